"""Statistics over seeds, against scipy's tests, enumeration and published numbers."""

import math

import numpy as np
import pytest
from scipy import stats

from fp4repro.errors import Fp4ReproError
from fp4repro.report.stats import estimate, relative_gaps


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_interval_is_the_set_of_means_a_t_test_does_not_reject(n):
    values = np.random.default_rng(n).normal(3.0, 0.1, n).tolist()
    got = estimate(values)
    for end, inside in ((got.low, 1), (got.high, -1)):
        assert stats.ttest_1samp(values, end).pvalue == pytest.approx(0.05, abs=1e-9)
        assert stats.ttest_1samp(values, end + inside * 1e-6).pvalue > 0.05
        assert stats.ttest_1samp(values, end - inside * 1e-6).pvalue < 0.05
    assert got.n == n
    assert got.mean == pytest.approx(math.fsum(values) / n)


def test_known_interval():
    # t(0.975, 2) = 4.302653 from a printed table; 1, 2, 3 have s = 1.
    got = estimate([1.0, 2.0, 3.0])
    assert got.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert got.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)


def test_interval_covers_at_its_nominal_rate():
    rng, draws = np.random.default_rng(0), 2000
    hits = 0
    for _ in range(draws):
        got = estimate(rng.normal(1.0, 0.2, 3).tolist())
        hits += got.low <= 1.0 <= got.high
    sigma = math.sqrt(0.95 * 0.05 / draws)
    assert abs(hits / draws - 0.95) < 4 * sigma


def test_one_value_has_no_interval():
    got = estimate([2.5])
    assert (got.mean, got.low, got.high, got.n) == (2.5, None, None, 1)


def test_equal_values_have_an_interval_of_no_width():
    got = estimate([2.0, 2.0, 2.0])
    assert (got.low, got.high) == (2.0, 2.0)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_no_mean_of_nothing_or_of_what_is_not_finite(values):
    with pytest.raises(Fp4ReproError, match="finite"):
        estimate(values)


def test_gap_is_positive_when_the_experiment_is_worse():
    assert relative_gaps({0: 2.267}, {0: 2.286})[0] == pytest.approx(0.838, abs=5e-4)
    assert relative_gaps({0: 3.2116}, {0: 3.2903})[0] == pytest.approx(2.45, abs=5e-3)
    assert relative_gaps({0: 2.0}, {0: 1.9})[0] == pytest.approx(-5.0)


def test_gaps_go_by_seed_and_not_by_order():
    assert relative_gaps({0: 2.0, 1: 4.0}, {1: 4.0, 0: 3.0}) == {0: 50.0, 1: 0.0}


def test_pairing_removes_what_the_seed_does():
    rng = np.random.default_rng(1)
    seed_effect = rng.normal(0, 0.2, 5)
    baseline = {seed: 3.0 + effect for seed, effect in enumerate(seed_effect)}
    experiment = {seed: 1.01 * value for seed, value in baseline.items()}
    gaps = list(relative_gaps(baseline, experiment).values())
    assert estimate(gaps).high - estimate(gaps).low < 1e-9
    assert estimate(list(baseline.values())).high - estimate(list(baseline.values())).low > 0.1


@pytest.mark.parametrize(
    ("baseline", "experiment", "said"),
    [
        ({0: 1.0, 1: 1.0}, {0: 1.0}, r"\[0, 1\].*\[0\]"),
        ({0: 1.0}, {1: 1.0}, r"\[0\].*\[1\]"),
        ({0: 0.0}, {0: 1.0}, "more than 0"),
    ],
)
def test_unpaired_or_senseless_gaps_are_refused(baseline, experiment, said):
    with pytest.raises(Fp4ReproError, match=said):
        relative_gaps(baseline, experiment)
