"""Two arms that answered the same questions: how far apart they are, and how sure that is.

With d_i the difference of the two answers to question i, an accuracy's difference is the mean of d and its
variance `(psi - delta^2) / n`, where psi is the share of discordant questions, those that exactly one arm
got right. Two accuracies without their questions only allow the unpaired variance
`(p (1 - p) + q (1 - q)) / n`, which is larger wherever the arms agree more often than by chance.

McNemar's exact test asks whether the discordant questions fall to either side like a fair coin (McNemar
1947). Intervals of measured differences are the 2.5 and 97.5 % points of a bootstrap over questions.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fp4repro.errors import Fp4ReproError
from fp4repro.report.questions import Answers
from fp4repro.report.stats import CONFIDENCE

RESAMPLES = 2000
POWER = 0.8
_AT_ONCE = 2**22  # draws held at a time
_KEY = 0x626F6F74  # "boot"
Z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))


@dataclass(frozen=True)
class Comparison:
    """An arm against a baseline on the same questions; `difference` is the arm's figure less its."""

    difference: float
    low: float
    high: float
    n: int
    only_arm: int  # questions that only the arm got right; both 0 for metrics that are no accuracy
    only_baseline: int

    @property
    def discordance(self) -> float:
        return (self.only_arm + self.only_baseline) / self.n

    @property
    def p_value(self) -> float:
        return mcnemar(self.only_arm, self.only_baseline)


def compare(arm: Answers, baseline: Answers) -> Comparison:
    """Pair two arms' answers; arms that answered other questions are refused."""
    if arm.questions != baseline.questions:
        missing = len(set(arm.questions) ^ set(baseline.questions))
        raise Fp4ReproError(
            f"a paired comparison needs the same questions in the same order, but {missing} of them were "
            "put to one arm only: evaluate both with the same tasks and limit"
        )
    of = arm.measure.of_ratio
    low, high = bootstrap(
        np.stack([arm.values, arm.weights, baseline.values, baseline.weights]),
        lambda s: of(s[0] / s[1]) - of(s[2] / s[3]),
    )
    return Comparison(
        difference=arm.figure - baseline.figure,
        low=low,
        high=high,
        n=len(arm.questions),
        only_arm=int(((arm.values == 1) & (baseline.values == 0)).sum()),
        only_baseline=int(((arm.values == 0) & (baseline.values == 1)).sum()),
    )


def bootstrap(columns: np.ndarray, statistic) -> tuple[float, float]:
    """95 % interval of a statistic of column sums, resampling questions; columns (k, questions).

    `statistic` takes sums (k, resamples) and returns (resamples,). The draws are the same always.
    """
    generator = np.random.Generator(np.random.Philox(key=_KEY))
    n = columns.shape[1]
    step = max(1, _AT_ONCE // n)
    sums = [
        columns[:, generator.integers(n, size=(min(step, RESAMPLES - start), n))].sum(-1)
        for start in range(0, RESAMPLES, step)
    ]
    values = statistic(np.concatenate(sums, axis=1))
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def mcnemar(only_arm: int, only_baseline: int) -> float:
    """Exact two-sided p-value; 1 where no question is discordant."""
    discordant = only_arm + only_baseline
    return float(stats.binomtest(only_arm, discordant).pvalue) if discordant else 1.0


def unpaired_half_width(p: float, q: float, n: int) -> float:
    """Half of the 95 % interval of p - q, of which nothing but n questions each is known."""
    return Z * math.sqrt((p * (1 - p) + q * (1 - q)) / n)


def paired_half_width(difference: float, discordance: float, n: int) -> float:
    """Half of the 95 % interval of a difference on n questions of which a share is discordant."""
    if not abs(difference) <= discordance <= 1:
        raise Fp4ReproError(
            f"a difference of {difference} cannot come from a share of {discordance} discordant questions"
        )
    return Z * math.sqrt((discordance - difference**2) / n)


def questions_needed(difference: float, discordance: float) -> int:
    """Questions that a paired test at 5 % needs to find a difference with 80 % power (Connor 1987, in
    its simpler form with one variance)."""
    if difference == 0:
        raise Fp4ReproError("no number of questions tells a difference of 0 from 0")
    half = paired_half_width(difference, discordance, 1) / Z
    return math.ceil(((Z + float(stats.norm.ppf(POWER))) * half / difference) ** 2)
