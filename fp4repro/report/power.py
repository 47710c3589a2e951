"""How many seeds a difference needs, from the spread of paired differences that was measured.

The two-sided t test of a mean of n paired differences finds a true difference d with the power
P(|T| > t(1 - alpha/2, df)), T noncentral t with noncentrality sqrt(n) d / sd. With variances pooled over
`groups` comparisons df is groups * (n - 1), as the table's intervals have it; alone it is n - 1.
"""

import math

import numpy as np
from scipy import stats

from fp4repro.errors import Fp4ReproError

POWER = 0.8
ALPHA = 0.05
MOST = 10_000  # seeds; more is as good as never
_QUANTILES = 4096


def power(difference: float, sd: float, n: int, groups: int = 1) -> float:
    """Chance that `n` pairs show a true difference of this size, sd of one pair in the same unit."""
    if n < 2 or not sd > 0:
        raise Fp4ReproError(f"power needs two pairs and a spread above 0, not {n} pairs and sd {sd}")
    df = groups * (n - 1)
    shift = abs(difference) * math.sqrt(n) / sd
    # Over quantiles of the estimated spread: scipy's own noncentral t is NaN for few df and large shifts.
    spread = np.sqrt(stats.chi2.ppf((np.arange(_QUANTILES) + 0.5) / _QUANTILES, df) / df)
    critical = stats.t.ppf(1 - ALPHA / 2, df) * spread
    return float(np.mean(stats.norm.sf(critical - shift) + stats.norm.cdf(-critical - shift)))


def seeds_needed(difference: float, sd: float, groups: int = 1) -> int | None:
    """The fewest seeds with 80 % power for this difference; None beyond `MOST`."""
    low, high = 1, 2  # too few, and the next to try
    while power(difference, sd, high, groups) < POWER:
        if high > MOST:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(difference, sd, middle, groups) >= POWER else (middle, high)
    return high


def smallest_seen(sd: float, n: int, groups: int = 1) -> float:
    """The smallest difference that `n` seeds show with 80 % power, to a thousandth of the spread."""
    low, high = 0.0, sd
    while power(high, sd, n, groups) < POWER:
        low, high = high, 2 * high
    while high - low > sd / 1000:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, sd, n, groups) >= POWER else (middle, high)
    return high
