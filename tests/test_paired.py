"""Paired statistics against scipy, brute force and simulation; the paper's table against itself."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fp4repro.errors import Fp4ReproError
from fp4repro.report.accuracy import against_chance, chance_p_value, guesses, wilson
from fp4repro.report.evals import evals_rows, paired_rows
from fp4repro.report.evals_markdown import evals_markdown, paired_markdown
from fp4repro.report.paired import (
    bootstrap,
    compare,
    mcnemar,
    paired_half_width,
    questions_needed,
    unpaired_half_width,
)
from fp4repro.report.published import load_published
from fp4repro.report.published_accuracy import (
    accuracies,
    composite_faults,
    load_benchmarks,
    published_rows,
)
from fp4repro.report.questions import MEASURES, Answers, Evaluations, read_questions, write_questions

ROOT = Path(__file__).parents[1]
PUBLISHED = load_published(ROOT / "configs" / "published.yaml")


def answers(values, weights=None, chance=0.1):
    values = np.array(values, dtype=float)
    names = tuple(str(i) for i in range(len(values)))
    weights = np.ones(len(values)) if weights is None else np.array(weights, dtype=float)
    return Answers(names, values, weights, None if chance is None else np.full(len(values), chance))


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (3, 9), (7, 7), (40, 20)])
def test_mcnemar_is_the_two_sided_sign_test(b, c):
    n = b + c
    # Every way in which the discordant questions may fall that is no likelier than the one seen.
    law = [math.comb(n, k) / 2**n for k in range(n + 1)]
    wanted = sum(p for p in law if p <= law[b] * (1 + 1e-9))
    assert mcnemar(b, c) == pytest.approx(wanted)
    assert mcnemar(b, c) == mcnemar(c, b)


def test_a_comparison_of_two_arms():
    arm, baseline = answers([1, 1, 1, 0, 0, 1]), answers([1, 0, 0, 1, 0, 1])
    got = compare(arm, baseline)
    assert (got.only_arm, got.only_baseline, got.n) == (2, 1, 6)
    assert got.difference == pytest.approx(1 / 6)
    assert got.discordance == 0.5
    assert got.low < got.difference < got.high
    same = compare(arm, arm)
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1.0)


def test_the_bootstrap_interval_is_scipys():
    generator = np.random.default_rng(0)
    a, b = generator.random((2, 400)) < [[0.6], [0.5]]
    got = compare(answers(a), answers(b))
    wanted = stats.bootstrap(
        (a.astype(float) - b,), np.mean, n_resamples=4000, method="percentile", random_state=1
    ).confidence_interval
    assert got.low == pytest.approx(wanted.low, abs=0.006)
    assert got.high == pytest.approx(wanted.high, abs=0.006)
    # The analytic width with the discordance that was seen is the same.
    half = paired_half_width(got.difference, got.discordance, got.n)
    assert (got.high - got.low) / 2 == pytest.approx(half, rel=0.08)


def test_pairing_narrows_where_arms_agree():
    generator = np.random.default_rng(1)
    right = generator.random(1000) < 0.6
    other = right ^ (generator.random(1000) < 0.05)
    got = compare(answers(right), answers(other))
    unpaired = unpaired_half_width(right.mean(), other.mean(), 1000)
    assert (got.high - got.low) / 2 < 0.5 * unpaired


def test_a_ratio_is_resampled_with_its_weights():
    bits, nbytes = np.array([10.0, 20.0, 60.0]), np.array([1.0, 10.0, 20.0])
    low, high = bootstrap(np.stack([bits, nbytes]), lambda s: s[0] / s[1])
    possible = {sum(bits[list(i)]) / sum(nbytes[list(i)]) for i in itertools.product(range(3), repeat=3)}
    assert min(possible) <= low < high <= max(possible)
    assert answers(bits, nbytes).figure == 90 / 31


def test_a_perplexity_is_the_exponential_of_its_ratio():
    generator = np.random.default_rng(4)
    words = generator.integers(5, 50, 30)
    arm, baseline = (
        replace(answers(nats, words), measure=MEASURES["word_perplexity"])
        for nats in (words * 3.2 + generator.random(30), words * 3.0 + generator.random(30))
    )
    wanted = [np.exp(a.values.sum() / words.sum()) for a in (arm, baseline)]
    got = compare(arm, baseline)
    assert arm.figure == wanted[0] and got.difference == wanted[0] - wanted[1]
    assert 0 < got.low < got.difference < got.high


def test_arms_with_other_questions_are_refused():
    with pytest.raises(Fp4ReproError, match="1 of them were put to one arm only"):
        compare(answers([1, 0]), answers([1, 0, 1]))


def test_models_with_other_samples_are_paired_with_themselves_alone():
    asked = ("cloze", "acc")
    found = {("run", "bf16"): {asked: answers([1, 0, 1])}, ("run", "nvfp4"): {asked: answers([1, 1, 1])}}
    found |= {("big", "bf16"): {asked: answers([1, 0])}, ("big", "nvfp4"): {asked: answers([0, 1])}}
    pairs = {row.setting for row in paired_rows(found, {"scale": "s"})}
    assert pairs == {"run in nvfp4 against run in bf16", "big in nvfp4 against big in bf16"}
    found["big", "nvfp4"] = {asked: answers([1, 0, 1, 1])}
    with pytest.raises(Fp4ReproError, match="same questions"):
        paired_rows(found, {"scale": "s"})


def test_the_interval_of_one_accuracy_covers_it():
    low, high = wilson(50, 100)
    z = stats.norm.ppf(0.975)
    centre, half = (0.5 + z**2 / 200) / (1 + z**2 / 100), z * math.sqrt(0.25 / 100 + z**2 / 40000)
    assert (low, high) == pytest.approx((centre - half / (1 + z**2 / 100), centre + half / (1 + z**2 / 100)))
    assert wilson(0, 10)[0] == 0.0 and wilson(10, 10)[1] == 1.0


def test_guesses_follow_the_poisson_binomial_law():
    chances = [0.1, 0.25, 1 / 3, 0.5]
    wanted = np.zeros(5)
    for outcome in itertools.product([0, 1], repeat=4):
        p = math.prod(c if right else 1 - c for right, c in zip(outcome, chances, strict=True))
        wanted[sum(outcome)] += p
    assert guesses(np.array(chances)) == pytest.approx(wanted)
    same = np.full(50, 0.1)
    assert guesses(same) == pytest.approx(stats.binom.pmf(range(51), 50, 0.1))
    assert chance_p_value(12, same) == pytest.approx(2 * stats.binom.sf(11, 50, 0.1))


@pytest.mark.parametrize(("right", "said"), [(6, "not different from"), (30, "above"), (0, "below")])
def test_chance_is_said_in_words(right, said):
    text = against_chance(right, np.full(60, 0.1))
    assert text.startswith("chance 10.00 %, ") and f"{said} chance" in text


def test_the_number_of_questions_finds_the_difference_with_its_power():
    difference, discordance = 0.05, 0.2
    n = questions_needed(difference, discordance)
    generator = np.random.default_rng(2)
    gains = generator.multinomial(
        n, [(discordance + difference) / 2, (discordance - difference) / 2, 1 - discordance], size=20_000
    )
    d = (gains[:, 0] - gains[:, 1]) / n
    se = np.sqrt(((gains[:, 0] + gains[:, 1]) / n - d**2) / n)
    assert (np.abs(d / se) > stats.norm.ppf(0.975)).mean() == pytest.approx(0.8, abs=0.015)
    assert questions_needed(0.0004, 0.1) == pytest.approx(7.849 * 0.1 / 0.0004**2, rel=1e-3)
    with pytest.raises(Fp4ReproError, match="difference of 0"):
        questions_needed(0.0, 0.1)


def test_the_papers_composites_are_the_means_of_their_benchmarks():
    found, benchmarks = accuracies(PUBLISHED), load_benchmarks()
    assert len(found) == 14 + 5 and all(set(arms) == {"fp8", "nvfp4"} for arms in found.values())
    assert list(composite_faults(found, benchmarks)) == []
    found["mmlu"] = found["mmlu"] | {"fp8": found["hellaswag"]["fp8"]}
    assert "mean-general, fp8: printed 68.99" in next(composite_faults(found, benchmarks))


def test_the_papers_mmlu_pro_cannot_be_told_apart():
    rows = {row.metric: row for row in published_rows(PUBLISHED, load_benchmarks())}
    row = rows["mmlu-pro.difference"]
    se = math.sqrt((0.6258 * 0.3742 + 0.6262 * 0.3738) / 12032)
    assert row.value == -0.04 and row.provenance == "modelled"
    assert row.ci_high - row.value == pytest.approx(100 * 1.959964 * se, rel=1e-6)
    paired = rows["mmlu-pro.difference.discordant_10"]
    assert row.ci_low < paired.ci_low < 0 < paired.ci_high < row.ci_high
    assert rows["mmlu-pro.fp8"].provenance == "published"
    assert rows["mgsm.difference"].ci_low is None and "not known" in rows["mgsm.difference"].note


def test_two_figures_for_one_place_are_refused():
    double = replace(next(entry for entry in PUBLISHED if entry.accuracy), id="again")
    with pytest.raises(Fp4ReproError, match="accuracy-mmlu-fp8 and again are both mmlu, fp8"):
        accuracies([*PUBLISHED, double])


def test_questions_are_read_as_they_were_written_and_shown(tmp_path):
    rows = []
    generator = np.random.default_rng(3)
    for recipe in ("bf16", "nvfp4"):
        for number in range(30):
            right = float(generator.random() < 0.3)
            rows.append(("run", recipe, "cloze", f"q{number}", "acc", right, 1.0, 0.1))
            bits = float(generator.random() * 30)
            rows.append(("run", recipe, "cloze", f"q{number}", "gold_bits_per_byte", bits, 12.0, None))
    write_questions(tmp_path / "q.csv", rows)
    found = read_questions([tmp_path / "q.csv"])
    assert list(found) == [("run", "bf16"), ("run", "nvfp4")]
    acc = found["run", "nvfp4"]["cloze", "acc"]
    assert acc.values.tolist() == [row[5] for row in rows if row[1] == "nvfp4" and row[4] == "acc"]
    where = {"scale": "s", "device": "d", "torch": "t", "commit": "c"}
    missing = [(("run", "bf16"), "mmlu_pro_cloze", "no local MMLU-Pro")]
    table = evals_rows(Evaluations(found, missing, where))
    paired = paired_rows(found, where)
    text = evals_markdown(table)
    assert f"{100 * acc.figure:.2f} [" in text and "no local MMLU-Pro." in text
    by = {row.metric: row for row in paired}
    assert by["cloze.acc.difference"].value == pytest.approx(
        100 * (acc.figure - found["run", "bf16"]["cloze", "acc"].figure)
    )
    assert 0 < by["cloze.acc.mcnemar_p"].value <= 1
    text = paired_markdown([*paired, *published_rows(PUBLISHED, load_benchmarks())])
    assert "62.58 against 62.62 is a difference of -0.04 [-1.26, +1.18] points" in text
    assert "run in nvfp4 against run in bf16" in text


def test_a_damaged_file_of_questions_is_a_sentence(tmp_path):
    path = tmp_path / "q.csv"
    write_questions(path, [("m", "r", "t", "q", "acc", 1.0, 1.0, None)] * 2)
    with pytest.raises(Fp4ReproError, match="stands there more than once"):
        read_questions([path])
    path.write_text(path.read_text().replace("1.0,1.0", "one,1.0"))
    with pytest.raises(Fp4ReproError, match=r"line 2: .*'one'"):
        read_questions([path])
    path.write_text("a,b\n1,2\n")
    with pytest.raises(Fp4ReproError, match="not a file of questions"):
        read_questions([path])
