"""The table of Full-Stack FP4's modules, on made-up runs whose losses and bytes are known."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fp4repro.ablations import FULLSTACK, load_ablations
from fp4repro.config import load_scale
from fp4repro.report import fullstack as table
from fp4repro.report.attention_control import attention_control_markdown
from fp4repro.report.attention_control_figure import attention_control_figure
from fp4repro.report.fullstack_figure import fullstack_figure
from fp4repro.report.fullstack_markdown import fullstack_markdown
from fp4repro.report.published import load_published
from fp4repro.report.schema import ACTIVATION_BYTES, DIVERGED, OPTIMIZER_BYTES, Row, run_setting, write_rows
from fp4repro.report.tables import GAP

ROOT = Path(__file__).parents[1]
ENTRIES = load_ablations(FULLSTACK)
PUBLISHED = load_published(ROOT / "configs" / "published.yaml")
SEEDS, STEPS = (0, 1, 2), 40
# Gaps in per cent of a loss of 4 by seed; the singles add up to 2.0, 2.3 and 2.6.
GAPS = {
    "bf16": (0, 0, 0),
    "four-over-six": (2.0, 2.1, 2.2),
    "projections": (1.0, 1.1, 1.2),
    "attention": (0.2, 0.3, 0.4),
    "optimizer": (0.8, 0.9, 1.0),
    "projections_attention": (1.3, 1.4, 1.5),
    "optimizer_attention": (1.1, 1.2, 1.3),
    "full_stack": (2.5, 2.3, 2.4),
}
MUON = {"muon_base": (-1.0, -1.0, -1.0), "muon_full_stack": (1.0, 1.0, None)}
BYTES = {"bf16": 8e6, "optimizer": 1.3e6, "full_stack": 1.3e6}


def write_run(root, protocol, entry, seed, gap):
    """A run whose losses are 4 nats, noise that the seed's runs share, and a gap in the second half."""
    folder = root / protocol / entry / f"seed-{seed}"
    folder.mkdir(parents=True)
    loss = None if gap is None else 4 * (1 + gap / 100)
    share = np.where(np.arange(STEPS) < STEPS // 2, 9.0, gap or 0) / 100
    noise = np.random.default_rng(seed).normal(0, 0.1, STEPS)
    noise[STEPS // 2 :] -= noise[STEPS // 2 :].mean()  # BF16's mean is 4
    losses = enumerate((4 * (1 + share) + noise).tolist(), 1)
    text = "step,train_loss\n" + "".join(f"{step},{value!r}\n" for step, value in losses)
    (folder / "curve.csv").write_text(text)
    values = {"validation_loss": loss, "validation_loss_bf16": loss, DIVERGED: int(gap is None)}
    values |= {OPTIMIZER_BYTES: BYTES[entry], ACTIVATION_BYTES: 2e6} if entry in BYTES else {}
    note = "diverged: training loss is nan at step 7" if gap is None else ""
    rows = [
        Row(
            experiment=protocol, setting=run_setting(entry, seed), metric=metric, value=value, unit="x",
            n=1, scale="smoke", note=note,
        )
        for metric, value in values.items()
    ]  # fmt: skip
    write_rows(folder / "metrics.csv", rows)


def scale(**section):
    found = load_scale(ROOT / "configs" / "scales" / "smoke.yaml")
    section = {"scratch": (), "branches": (), "scratch_seeds": SEEDS, "branch_seeds": SEEDS} | section
    return dataclasses.replace(found, fullstack=dataclasses.replace(found.fullstack, **section))


@pytest.fixture
def rows(tmp_path):
    """The modules as branches, Muon from scratch, in runs smaller than the scale's."""
    for seed in SEEDS:
        for entry, gaps in GAPS.items():
            write_run(tmp_path, "branches", entry, seed, gaps[seed])
        for entry, gaps in ({"bf16": GAPS["bf16"]} | MUON).items():
            write_run(tmp_path, "fullstack", entry, seed, gaps[seed])
    taken = scale(branches=(*list(GAPS)[1:], "attention_pv"), scratch=tuple(MUON))
    return table.fullstack_rows(taken, ENTRIES, PUBLISHED, tmp_path)


def pick(rows, setting, metric, provenance="measured"):
    (row,) = [r for r in rows if (r.setting, r.metric, r.provenance) == (setting, metric, provenance)]
    return row


def pooled(*groups):
    """Standard deviation and degrees of freedom, by hand."""
    squares = sum(sum((x - sum(g) / len(g)) ** 2 for x in g) for g in groups)
    df = sum(len(g) - 1 for g in groups)
    return math.sqrt(squares / df), df


def test_gaps_are_of_the_second_half_and_paired_with_a_pooled_spread(rows):
    row = pick(rows, "branches/projections", GAP + "bf16")
    sd, df = pooled(*(g for name, g in GAPS.items() if name != "bf16"))
    half = stats.t.ppf(0.975, df) * sd / 3**0.5
    assert (row.value, row.ci_low, row.ci_high) == pytest.approx((1.1, 1.1 - half, 1.1 + half))
    assert pick(rows, "branches/full_stack", GAP + "projections_attention").value == pytest.approx(
        np.mean([100 * ((100 + a) / (100 + b) - 1) for a, b in ((2.5, 1.3), (2.3, 1.4), (2.4, 1.5))])
    )


def test_muon_is_against_its_own_baseline_and_pooled_apart(rows):
    row = pick(rows, "scratch/muon_full_stack", GAP + "muon_base")
    assert row.value == pytest.approx(100 * (1.01 / 0.99 - 1)) and row.n == 2
    assert "diverged: training loss is nan" in row.note
    assert pick(rows, "scratch/muon_full_stack", DIVERGED).value == 1
    sd, _ = pooled((1.01, 1.01))  # the pair of seeds 0 and 1; muon_base's own difference to itself is none
    assert pick(rows, "scratch/all", "paired_sd_to_muon_base").value == pytest.approx(sd, abs=1e-9)


def test_the_sum_of_the_singles_beside_all(rows):
    total, beyond = (
        pick(rows, "branches/full_stack", metric) for metric in (table.SUM_OF_SINGLES, table.INTERACTION)
    )
    assert total.value == pytest.approx(2.3)
    assert total.ci_high - total.value == pytest.approx(stats.t.ppf(0.975, 2) * 0.3 / 3**0.5)
    differences = (2.5 - 2.0, 2.3 - 2.3, 2.4 - 2.6)
    assert beyond.value == pytest.approx(sum(differences) / 3) and beyond.n == 3
    assert beyond.ci_low == pytest.approx(beyond.value - stats.t.ppf(0.975, 2) * stats.sem(differences))
    assert not [row for row in rows if row.setting.startswith("scratch") and row.metric == total.metric]


def test_memory_where_a_run_wrote_it(rows):
    assert pick(rows, "branches/full_stack", OPTIMIZER_BYTES).value == 1.3e6
    assert pick(rows, "branches/bf16", OPTIMIZER_BYTES).value == 8e6
    missing = pick(rows, "branches/attention", ACTIVATION_BYTES)
    assert missing.value is None and missing.note == f"not run: attention wrote no {ACTIVATION_BYTES}"
    assert missing.unit == "bytes"


def test_verdicts_on_the_papers_claims(rows):
    """LoRA-SVD: 1 % better, in every seed. All together against the projections alone: 1.3 % worse."""
    said = {name: pick(rows, f"branches/{name}", "claim_1") for name in ("projections", "full_stack")}
    assert said["projections"].note.startswith("supported") and said["projections"].value < -0.9
    assert said["full_stack"].note.startswith("not supported at this scale: expected the same as projections")
    assert "(1B, 20B tokens, with Root" in pick(rows, "branches/full_stack", "claim_1", "published").note


def test_published_gaps_name_their_version(rows):
    found = {row.setting: row for row in rows if row.provenance == "published" and row.metric == GAP + "bf16"}
    assert {name: row.value for name, row in found.items()} == {
        "full-stack-3b-v1": 1.47,
        "full-stack-3b-v2": 0.838,
        "full-stack-1b-direct": 1.40,
        "full-stack-1b-lora-svd": 0.61,
        "full-stack-1b-all": 0.62,
    }
    assert all(f"version {v} of the abstract" in found[f"full-stack-3b-v{v}"].note for v in (1, 2))


def test_the_markdown_and_the_figure(rows, tmp_path):
    text = fullstack_markdown(rows, ENTRIES)
    lines = {cells[2].strip(): cells for line in text.splitlines() if len(cells := line.split("|")) > 9}
    assert lines["full_stack"][4].strip().startswith("+2.40 [") and "1.300" in lines["full_stack"][7]
    assert lines["bf16"][1].strip() == "baseline" and "8.000" in lines["bf16"][6]
    assert lines["attention_pv"][-2].strip() == "not run"
    assert "in %: projections +1.10 [" in text and "in %: optimizer +0.90 [" in text
    assert "alone add up to +2.30 [" in text and "which is +0.10 [" in text
    assert "0.838 %" in text and "1.47 %" in text and "version 2 of the abstract" in text
    fullstack_figure(rows, ENTRIES, tmp_path / "a.png", tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert "branches/full_stack" in drawn and "sum of the single gaps" in drawn
    assert "not run or diverged" in drawn  # attention_pv


def test_nothing_made_is_said(tmp_path):
    rows = table.fullstack_rows(scale(branches=("projections",)), ENTRIES, PUBLISHED, tmp_path)
    row = pick(rows, "branches/projections", GAP + "bf16")
    assert row.value is None and row.note.startswith("not run: projections of seed 0, 1, 2 was not run")
    assert not [row for row in rows if row.metric == table.INTERACTION]
    assert "not run" in fullstack_markdown(rows, ENTRIES)


def test_the_training_control_of_attention(tmp_path):
    losses = {
        ("high precision", 0): 2.0,
        ("high precision", 1): 2.2,
        ("control", 0): 2.5,
        ("control", 1): None,
    }
    rows = []
    for (setting, seed), loss in losses.items():
        common = {"experiment": "attention_control", "setting": f"{setting}/seed-{seed}", "unit": "nats/byte"}
        note = "400 steps, width 128" if loss else "diverged; 400 steps, width 128"
        rows.append(Row(metric="validation_loss", value=loss, note=note, **common))
        if setting == "control":
            gap = None if loss is None else loss - losses["high precision", seed]
            rows.append(Row(metric="validation_loss_gap", value=gap, note=note, **common))
    text = attention_control_markdown(rows)
    half = stats.t.ppf(0.975, 1) * 0.1
    assert f"2.1000 [{2.1 - half:.4f}, {2.1 + half:.4f}]" in text
    assert "+0.5000 (no interval: one seed), 1 of 2 diverged" in text
    attention_control_figure(rows, tmp_path / "a.png", tmp_path / "a.svg")
    assert "seed 1 diverged" in (tmp_path / "a.svg").read_text()
