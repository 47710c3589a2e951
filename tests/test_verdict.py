"""Spreads, intervals over steps, power and verdicts, against brute force and other packages."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from fp4repro.errors import Fp4ReproError
from fp4repro.report.power import power, seeds_needed, smallest_seen
from fp4repro.report.stats import Spread, block_bootstrap, estimate, pooled
from fp4repro.report.token_factor import token_factor
from fp4repro.report.verdict import MARGIN, Difference, margin_for, verdict

GENERATOR = np.random.default_rng(20250929)


# Spread


def test_pooled_variance_is_that_of_an_analysis_of_variance():
    groups = [GENERATOR.normal(mean, 2.0, size) for mean, size in ((0, 2), (5, 3), (-1, 7))]
    spread = pooled(groups)
    between = sum(len(g) * (g.mean() - np.concatenate(groups).mean()) ** 2 for g in groups) / 2
    assert math.isclose(between / spread.sd**2, scipy_stats.f_oneway(*groups).statistic)
    assert spread.df == 9
    assert pooled([[1.0], [2.0]]) is None


def test_one_group_has_the_interval_of_the_mean():
    values = [0.1, 0.4, 0.2]
    low, high = pooled([values]).interval(np.mean(values), 3)
    got = estimate(values)
    np.testing.assert_allclose((low, high), (got.low, got.high))


# Moving blocks


def walk(size, keep, generator):
    """An autoregressive series with mean 0."""
    values = [generator.normal()]
    for _ in range(size - 1):
        values.append(keep * values[-1] + generator.normal())
    return np.array(values)


@pytest.mark.parametrize(("keep", "block"), [(0.0, 1), (0.5, 12)])
def test_the_bootstrap_covers_the_mean_of_series_with_and_without_memory(keep, block):
    generator = np.random.default_rng(1)
    covered = wide = 0
    for draw in range(150):
        series = [walk(200, keep, generator) for _ in range(2)]
        low, high = block_bootstrap(series, block, draws=300, seed=draw)
        covered += low <= 0 <= high
        low, high = block_bootstrap(series, 1, draws=300, seed=draw)
        wide += low <= 0 <= high
    assert 0.86 < covered / 150 <= 0.99
    if keep:  # single values forget the memory, and their interval is too short
        assert wide / 150 < 0.85


def test_the_bootstrap_repeats_and_has_the_width_of_the_standard_error():
    series = [GENERATOR.normal(3, 1, 400)]
    low, high = block_bootstrap(series, 1, draws=4000)
    assert (low, high) == block_bootstrap(series, 1, draws=4000)
    error = series[0].std(ddof=1) / math.sqrt(400)
    assert abs((high - low) / (2 * 1.96 * error) - 1) < 0.1
    assert block_bootstrap([np.full(10, 2.0)], 64) == (2.0, 2.0)  # a block longer than the series


# Power


@pytest.mark.parametrize(("difference", "n", "groups"), [(1.0, 4, 1), (0.6, 3, 10), (2.0, 2, 6)])
def test_power_by_simulation(difference, n, groups):
    trials = 20_000
    noise = GENERATOR.normal(0, 1, (trials, groups, n))
    means = difference + noise[:, 0].mean(-1)
    sd = noise.std(-1, ddof=1)
    pooled_sd = np.sqrt((sd**2).mean(-1))
    critical = scipy_stats.t.ppf(0.975, groups * (n - 1))
    seen = np.mean(np.abs(means) > critical * pooled_sd / math.sqrt(n))
    assert abs(power(difference, 1.0, n, groups) - seen) < 0.015


def test_seeds_needed_is_the_first_number_that_is_enough():
    for difference, groups in ((0.5, 1), (1.0, 1), (0.25, 20), (5.0, 1)):
        n = seeds_needed(difference, 1.0, groups)
        assert power(difference, 1.0, n, groups) >= 0.8
        assert n == 2 or power(difference, 1.0, n - 1, groups) < 0.8
    assert seeds_needed(0.5, 1.0) == 34  # tables of the paired t test: effect size 0.5, power 0.8
    assert seeds_needed(1e-6, 1.0) is None
    with pytest.raises(Fp4ReproError, match="spread above 0"):
        power(1.0, 0.0, 3)


def test_the_smallest_difference_seen_has_the_power():
    for n, groups in ((2, 1), (3, 12), (34, 1)):
        assert math.isclose(power(smallest_seen(0.3, n, groups), 0.3, n, groups), 0.8, abs_tol=2e-3)
    assert math.isclose(smallest_seen(1.0, 34), 0.5, abs_tol=0.01)


# Verdicts


def d(mean, half, diverged=0, runs=3):
    """A difference whose 95 % interval is mean +- half."""
    spread = Spread(half * math.sqrt(3) / scipy_stats.t.ppf(0.975, 20), 20)
    difference = Difference(mean, 3, spread, diverged, runs)
    np.testing.assert_allclose(difference.interval(), (mean - half, mean + half))
    return difference


@pytest.mark.parametrize(
    ("expect", "difference", "expected"),
    [
        ("worse", d(1.0, 0.9), "supported"),
        ("worse", d(1.0, 1.1), "undecided"),
        ("worse", d(0.0, 0.24), "not supported"),
        ("worse", d(0.1, 0.05), "not supported"),  # worse, by less than matters
        ("worse", d(0.24, 0.1), "supported"),
        ("worse", d(-1.0, 0.5), "not supported"),
        ("worse", d(-1.0, 2.0), "undecided"),
        ("worse", d(0.0, 5.0, diverged=2), "supported"),
        ("worse", d(0.0, 5.0, diverged=1), "undecided"),
        ("better", d(-1.0, 0.9), "supported"),
        ("better", d(1.0, 0.9), "not supported"),
        ("better", d(-1.0, 1.1), "undecided"),
        ("better", d(-1.0, 0.9, diverged=2), "supported"),
        ("same", d(0.0, 0.2), "supported"),
        ("same", d(0.0, 0.28), "supported"),  # its 90 % interval is +-0.23
        ("same", d(0.0, 0.32), "undecided"),
        ("same", d(0.1, 0.05), "supported"),
        ("same", d(0.3, 0.1), "not supported"),
        ("same", d(-0.3, 0.1), "not supported"),
        ("same", d(0.2, 0.3), "undecided"),
        ("diverges", d(0.0, 5.0, diverged=2), "supported"),
        ("diverges", d(1.0, 0.5, diverged=1), "undecided"),
        ("diverges", d(1.0, 0.5), "undecided"),
        ("diverges", d(0.0, 0.1), "not supported"),
    ],
)
def test_verdicts(expect, difference, expected):
    assert verdict(expect, difference) == expected


def test_without_a_spread_nothing_is_decided():
    for mean in (None, 5.0):
        for expect in ("worse", "better", "same", "diverges"):
            assert verdict(expect, Difference(mean, 1, None)) == "undecided"


def test_the_margin_is_a_sixth_of_the_whole_recipes_gap():
    assert MARGIN == margin_for(None) == margin_for(-0.1) == 0.25
    assert math.isclose(margin_for(0.3), 0.05)
    assert verdict("same", d(0.0, 0.2), 0.05) == "undecided"
    assert verdict("worse", d(0.1, 0.05), 0.05) == "supported"
    assert verdict("better", d(0.0, 0.2), 0.05) == "undecided"
    assert verdict("diverges", d(0.1, 0.05), 0.05) == "undecided"


# Token factor


def test_a_token_factor_from_losses_that_follow_a_line():
    losses = {f: {s: 4.1 + s - 0.5 * math.log(f) for s in (0, 1)} for f in (1.0, 1.25, 1.5)}
    target = {0: 4.1 - 0.5 * math.log(1.36), 1: 5.1 - 0.5 * math.log(1.36)}
    got = token_factor(losses, target)
    assert math.isclose(got.mean, 1.36) and got.n == 2
    assert math.isclose(got.low, 1.36) and math.isclose(got.high, 1.36)
    apart = token_factor(losses, target | {1: 5.1 - 0.5 * math.log(1.2)})
    assert math.isclose(apart.mean, math.sqrt(1.36 * 1.2)) and apart.low < 1.2 < 1.36 < apart.high


def test_a_token_factor_that_cannot_be_had():
    rising = {1.0: {0: 4.0}, 1.5: {0: 4.1}}
    with pytest.raises(Fp4ReproError, match="does not fall with more tokens"):
        token_factor(rising, {0: 3.9})
    with pytest.raises(Fp4ReproError, match="two lengths"):
        token_factor({1.0: {0: 4.0}}, {0: 3.9})
