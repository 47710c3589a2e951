"""The ablation table and figure from made-up runs whose differences are known."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from fp4repro.ablations import load_ablations
from fp4repro.config import load_scale
from fp4repro.errors import Fp4ReproError
from fp4repro.report.ablations import ablation_rows
from fp4repro.report.ablations_figure import ablations_figure
from fp4repro.report.ablations_markdown import ablations_markdown
from fp4repro.report.gaps import RISE, WINDOW, Outcomes, rise
from fp4repro.report.plan import plans
from fp4repro.report.published import load_published
from fp4repro.report.schema import Row, parse_rows, run_setting, write_rows

ROOT = Path(__file__).parents[1]
ENTRIES = load_ablations()
PUBLISHED = load_published(ROOT / "configs" / "published.yaml")
STEPS, SEEDS = 40, (0, 1)
# Loss above BF16's, in per cent of it, in the second half of a branch.
GAPS = {"bf16": 0.0, "nvfp4": 0.6, "no_sr": 0.9, "mxfp4": 1.6, "no_bf16_layers": 0.61, "sr_weights": 0.8}


def scale(**section):
    found = load_scale(ROOT / "configs" / "scales" / "smoke.yaml")
    plan = dataclasses.replace(found.ablations, scratch=(), branches=(), branch_seeds=SEEDS)
    return dataclasses.replace(found, ablations=dataclasses.replace(plan, **section))


def write_run(folder, name, seed, losses, validation, protocol="branches", diverged=""):
    folder.mkdir(parents=True)
    lines = [f"{step},{loss!r}\n" for step, loss in enumerate(losses.tolist(), 1)]
    (folder / "curve.csv").write_text("step,train_loss\n" + "".join(lines))
    values = {"validation_loss": validation, "validation_loss_bf16": validation, "diverged": 0}
    notes = {}
    if diverged:
        values = {"validation_loss": None, "validation_loss_bf16": None, "diverged": 1}
        notes = dict.fromkeys(values, diverged)
    write_rows(
        folder / "metrics.csv",
        [
            Row(experiment=protocol, setting=run_setting(name, seed), metric=metric, value=value,
                unit="x", n=1, scale="smoke", note=notes.get(metric, ""))
            for metric, value in values.items()
        ],
    )  # fmt: skip


@pytest.fixture
def branches(tmp_path):
    """Branches of made-up losses: 4 nats, a seed's own noise that all share, and a gap in the second half
    that differs by +-0.01 % between the seeds."""
    for seed in SEEDS:
        noise = np.random.default_rng(seed).normal(0, 0.1, STEPS)
        for name, gap in GAPS.items():
            share = np.where(np.arange(STEPS) < STEPS // 2, 5.0, gap + (0.01 if seed else -0.01) * (gap > 0))
            losses = 4 + noise + 0.04 * share
            diverged = "diverged: training loss is nan at step 40" if name == "sr_weights" else ""
            folder = tmp_path / "branches" / name / f"seed-{seed}"
            write_run(folder, name, seed, losses, 4 + 0.04 * gap, diverged=diverged)
    return tmp_path


NAMES = ("nvfp4", "mxfp4", "no_sr", "no_bf16_layers", "last_4", "sr_weights", "no_rht")


def table(root, **section):
    taken = scale(**section or {"branches": NAMES})
    rows = ablation_rows(taken, ENTRIES, PUBLISHED, root)
    found = {(r.setting.partition("/")[2], r.metric): r for r in rows if r.provenance != "published"}
    return taken, rows, found


def test_gaps_are_those_of_the_second_half_paired_by_seed(branches):
    *_, found = table(branches)
    for name, other, gap in (("nvfp4", "bf16", 0.6), ("no_sr", "nvfp4", 0.3), ("mxfp4", "bf16", 1.6)):
        row = found[name, f"gap_to_{other}"]
        assert math.isclose(row.value, gap, rel_tol=0.04)  # per cent of a loss near 4
        assert row.ci_low < row.value < row.ci_high and row.n == 2
        assert math.isclose(found[name, f"train_gap_to_{other}"].value, row.value)
    # Pairs with bf16 differ by 0.02 between seeds, so their sd is 0.02 / sqrt(2); 4 groups of 2 that ended.
    row = found["all", "paired_sd_to_bf16"]
    assert math.isclose(row.value, 0.02 / math.sqrt(2), rel_tol=0.3) and "4 degrees" in row.note
    assert math.isclose(found["all", "smallest_difference_of_interest"].value, 0.1, rel_tol=0.04)


def test_verdicts_stand_beside_the_publications_words(branches):
    _, rows, found = table(branches)
    verdicts = {
        key[0]: row.note.partition(" at this scale")[0] for key, row in found.items() if "claim_1" in key
    }
    assert verdicts["nvfp4"] == verdicts["mxfp4"] == verdicts["no_sr"] == "supported"
    assert verdicts["no_bf16_layers"] == "not supported"  # neither diverged nor worse than the margin
    assert verdicts["sr_weights"] == "supported"  # both runs diverged
    assert found["sr_weights", "diverged"].value == 2
    assert verdicts["no_rht"].startswith("not run: no_rht of seed 0, 1 was not run")
    said = {(r.setting, r.metric): r for r in rows if r.provenance == "published"}
    row = said["branches/mxfp4", "claim_1"]
    assert row.value == 2.5 and "MXFP4 has a larger gap" in row.note and "arXiv:2509.25149" in row.note
    assert said["branches/no_sr", "claim_1"].value is None


def test_an_entry_that_comes_to_another_ones_run_says_so(branches):
    *_, found = table(branches)
    same, run = found["last_4", "gap_to_bf16"], found["no_bf16_layers", "gap_to_bf16"]
    assert same.value == run.value
    assert same.note == "the same run as no_bf16_layers in a model of 6 blocks"


def test_the_markdown_and_the_figure(branches, tmp_path):
    taken, rows, _ = table(branches)
    write_rows(tmp_path / "a.csv", rows)
    rows = parse_rows(tmp_path / "a.csv")
    text = ablations_markdown(rows, ENTRIES)
    lines = {line.split("|")[2].strip(): line for line in text.splitlines() if line.count("|") > 7}
    assert lines["nvfp4"].count("+0.60 [") == 2 and "to bf16" in lines["nvfp4"]
    assert "diverged" in lines["sr_weights"] and "2, 2" in lines["sr_weights"]
    assert "not run" in lines["no_rht"]
    assert "80 % power" in text and "Smallest difference of interest: 0.1" in text
    assert "| supported" in text and "| not supported" in text and "nan" not in text.replace("is nan", "")
    outcomes = Outcomes(plans(taken, ENTRIES)[0], branches)
    for _ in range(2):
        files = [tmp_path / f"figure.{kind}" for kind in ("png", "svg")]
        before = [file.read_bytes() for file in files if file.exists()]
        ablations_figure(rows, ENTRIES, outcomes, *files)
    assert before == [file.read_bytes() for file in files]
    drawn = files[1].read_text()
    assert "no_bf16_layers" in drawn and "not run or diverged" in drawn


def test_runs_from_scratch_compare_final_losses_and_give_the_token_factor(tmp_path):
    losses = {"bf16": 3.9, "nvfp4": 4.0, "mxfp4": 4.1, "fp8": 3.9}
    for seed in SEEDS:
        for name, loss in losses.items():
            folder = tmp_path / "pretrain" / name / f"seed-{seed}"
            write_run(folder, name, seed, np.full(STEPS, 4.0), loss + seed / 10, "pretrain")
        for name, factor in (("mxfp4_125", 1.25), ("mxfp4_150", 1.5)):
            loss = 4.1 + seed / 10 - 0.1 * math.log(factor) / math.log(1.36)
            folder = tmp_path / "ablations" / name / f"seed-{seed}"
            write_run(folder, name, seed, np.full(STEPS, 4.0), loss, "ablations")
    section = {"scratch": ("mxfp4_125", "mxfp4_150", "mxfp4"), "scratch_seeds": SEEDS}
    _, rows, found = table(tmp_path, **section)
    assert math.isclose(found["mxfp4", "token_factor"].value, 1.36)
    gap = found["mxfp4_125", "gap_to_nvfp4"]
    loss = 4.1 - 0.1 * math.log(1.25) / math.log(1.36)
    expected = np.mean([100 * (loss - 4.0) / 4.0, 100 * (loss - 4.0) / 4.1])
    assert math.isclose(gap.value, expected)
    assert "Token factor of mxfp4: 1.36" in ablations_markdown(rows, ENTRIES)
    assert "supported" in found["mxfp4", "claim_1"].note
    # As the scales plan it: the recipe at its own length is a pretraining run that nobody lists.
    unlisted = table(tmp_path, **section | {"scratch": ("mxfp4_125", "mxfp4_150")})[2]
    assert math.isclose(unlisted["mxfp4", "token_factor"].value, 1.36)


def test_branches_of_unequal_length_are_refused(branches):
    path = branches / "branches" / "no_sr" / "seed-1" / "curve.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    with pytest.raises(Fp4ReproError, match="no_sr and bf16 of seed 1 have 37 and 40 steps"):
        table(branches)


def test_divergence_is_a_rise_that_stays():
    falling = np.concatenate([np.linspace(6, 4, 100), np.full(WINDOW, 4.0)])
    assert rise(falling) == ""
    assert "ends" in rise(np.concatenate([falling, np.full(WINDOW, 4.01 + RISE)]))
    assert rise(np.concatenate([falling, np.full(WINDOW, 3.99 + RISE)])) == ""
    spike = np.concatenate([falling, [9.0] * 5, falling[-40:]])
    assert rise(spike) == ""  # came back
    assert rise(np.full(WINDOW, 9.0)) == ""  # too short to tell
