"""One arm's accuracy: its interval, and whether it can be told from guessing.

The interval is Wilson's (1927), which stays within 0 and 1. A guess is right with its own probability on
each question, one over the options, so the number of right guesses is Poisson-binomial; the two-sided
p-value is twice the smaller tail of that exact distribution, at most 1.
"""

import numpy as np
from scipy import stats

from fp4repro.report.stats import CONFIDENCE

LEVEL = 1 - CONFIDENCE


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % interval of the share right / n."""
    interval = stats.binomtest(right, n).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def guesses(chances: np.ndarray) -> np.ndarray:
    """Probability of 0, 1, ..., n right guesses, each with its own chance; float64, (n + 1,)."""
    law = np.ones(1)
    for chance in chances:
        law = np.convolve(law, [1 - chance, chance])
    return law


def chance_p_value(right: int, chances: np.ndarray) -> float:
    law = guesses(chances)
    return float(min(1.0, 2 * min(law[: right + 1].sum(), law[right:].sum())))


def against_chance(right: int, chances: np.ndarray) -> str:
    """Such as "chance 11.1 %, not different from chance (p = 0.31)"."""
    p = chance_p_value(right, chances)
    if p >= LEVEL:
        verdict = "not different from chance"
    else:
        verdict = "above chance" if right > chances.sum() else "below chance"
    return f"chance {100 * chances.mean():.2f} %, {verdict} (p = {p:.2g})"
