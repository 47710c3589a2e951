"""Means, intervals and gaps over seeds that are paired.

The same seed gives every recipe the same start and the same batches, so what the seed does to the
loss cancels in the difference of a pair. The relative gap of a pair is
`100 * (experiment - baseline) / baseline` per cent: positive means that the experiment is worse.
Intervals are Student's t at 95 % over the pairs, `mean +- t(0.975, n-1) * s / sqrt(n)`; one pair
has none. Where many comparisons of two or three pairs stand side by side, `Spread` pools their
variances, as an analysis of variance does: two pairs alone have t(0.975, 1) = 12.7.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Spread:
    """The standard deviation of one pair's difference, and the degrees of freedom that it stands on."""

    sd: float
    df: int

    def interval(self, mean: float, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Student's t interval of a mean of `n` pairs."""
        half = float(stats.t.ppf((1 + confidence) / 2, self.df)) * self.sd / math.sqrt(n)
        return mean - half, mean + half


def pooled(groups: Iterable[Sequence[float]]) -> Spread | None:
    """The spread within groups of differences, their variances pooled; None without two in any."""
    groups = [np.asarray(group, dtype=float) for group in groups if len(group) > 1]
    df = sum(len(group) - 1 for group in groups)
    if not df:
        return None
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    return Spread(math.sqrt(squares / df), df)


def block_bootstrap(
    series: Sequence[np.ndarray], block: int, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of the mean over series of the mean of each, by moving blocks (Kuensch 1989).

    Each series (one a seed, values in time order) is drawn anew from its overlapping runs of `block`
    values, so that neighbours stay together; the ends are percentiles of the means. The interval is
    for these seeds: what another seed would change is not in it.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    means = np.zeros(draws)
    for values in series:
        n, length = len(values), min(block, len(values))
        starts = generator.integers(n - length + 1, size=(draws, -(-n // length)))
        index = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, :n]
        means += np.asarray(values)[index].mean(1) / len(series)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


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
