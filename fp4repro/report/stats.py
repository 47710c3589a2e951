"""Means, intervals and gaps over seeds that are paired.

The same seed gives every recipe the same start and the same batches, so what the seed does to the
loss cancels in the difference of a pair. The relative gap of a pair is
`100 * (experiment - baseline) / baseline` per cent: positive means that the experiment is worse.
Intervals are Student's t at 95 % over the pairs, `mean +- t(0.975, n-1) * s / sqrt(n)`; one pair
has none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fp4repro.errors import Fp4ReproError

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `n` values with its 95 % interval; `low` and `high` are None for `n` = 1."""

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t interval of at least one finite value."""
    if not values or not all(math.isfinite(value) for value in values):
        raise Fp4ReproError(f"a mean needs at least one value, all of them finite; got {values}")
    mean, n = float(np.mean(values)), len(values)
    if n == 1:
        return Estimate(mean, None, None, 1)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * stats.sem(values))
    return Estimate(mean, mean - half, mean + half, n)


def relative_gaps(baseline: Mapping[int, float], experiment: Mapping[int, float]) -> dict[int, float]:
    """Gap of each pair in per cent, by seed; both sides must hold the same seeds."""
    if set(baseline) != set(experiment):
        raise Fp4ReproError(
            f"gaps are differences of pairs, but the baseline has the seeds {sorted(baseline)} and "
            f"the experiment {sorted(experiment)}: run the missing ones or leave them out of both"
        )
    for seed, value in baseline.items():
        if value <= 0:
            raise Fp4ReproError(f"the baseline of seed {seed} is {value}; a relative gap needs more than 0")
    return {seed: 100 * (experiment[seed] - baseline[seed]) / baseline[seed] for seed in sorted(baseline)}
