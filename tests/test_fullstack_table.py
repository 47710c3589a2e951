"""The table of Full-Stack FP4's modules, on runs with known losses and bytes, and its plan file."""

from itertools import pairwise
from pathlib import Path

import pytest
from scipy import stats

from fp4repro.config import read_yaml
from fp4repro.recipes import LoraSVD, recipe_names
from fp4repro.report import fullstack as table
from fp4repro.report.published import load_published
from fp4repro.report.runs import load_runs
from fp4repro.report.schema import DIVERGED, VALIDATION_LOSS, Row, run_setting, write_rows
from fp4repro.report.tables import GAP

ROOT = Path(__file__).parents[1]
PLAN = read_yaml(ROOT / "configs" / "fullstack.yaml")
PUBLISHED = load_published(ROOT / "configs" / "published.yaml")
# Gaps in per cent of a loss of 4 by seed; the singles add up to 2.0, 2.3 and 2.6.
GAPS = {
    "bf16": (0, 0, 0),
    "projections": (1.0, 1.1, 1.2),
    "attention": (0.2, 0.3, 0.4),
    "optimizer": (0.8, 0.9, 1.0),
    "projections_attention": (1.3, 1.4, 1.5),
    "optimizer_attention": (1.1, 1.2, 1.3),
    "all": (2.5, 2.3, 2.4),
    "muon_base": (-1.0, -1.0, -1.0),
    "muon_all": (1.0, 1.0, None),
}


def write_run(folder, entry, seed, gap):
    out = folder / entry / f"seed-{seed}"
    loss = None if gap is None else 4 * (1 + gap / 100)
    values = {VALIDATION_LOSS: (loss, "nats/token"), DIVERGED: (int(gap is None), "runs")}
    if entry in ("bf16", "all"):
        values[table.OPTIMIZER_BYTES] = (8e6 if entry == "bf16" else 1.3e6, "bytes")
    why = "diverged: training loss is nan at step 7" if gap is None else ""
    rows = [
        Row(
            experiment="ablations",
            setting=run_setting(entry, seed),
            metric=metric,
            value=value,
            unit=unit,
            n=1,
            scale="test",
            note=why,
        )
        for metric, (value, unit) in values.items()
    ]
    write_rows(out / "metrics.csv", rows)
    return out


@pytest.fixture
def rows(tmp_path):
    folders = [write_run(tmp_path, e, seed, g) for e, gaps in GAPS.items() for seed, g in enumerate(gaps)]
    runs = load_runs("ablations", "test", tuple(GAPS), (0, 1, 2), folders)
    return table.fullstack_rows(runs, PUBLISHED)


def pick(rows, setting, metric):
    (row,) = [r for r in rows if (r.setting, r.metric) == (setting, metric)]
    return row


def test_gaps_are_paired_and_against_the_own_baseline(rows):
    row = pick(rows, "projections", GAP + "bf16")
    half = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5
    assert (row.value, row.ci_low, row.ci_high) == pytest.approx((1.1, 1.1 - half, 1.1 + half))
    muon = pick(rows, "muon_all", GAP + "muon_base")
    assert muon.value == pytest.approx(100 * (1.01 / 0.99 - 1)) and muon.n == 2
    assert "seed 2 diverged" in muon.note and not any(
        r.metric == GAP + "muon_base" for r in rows if r != muon
    )
    assert pick(rows, "muon_all", DIVERGED).value == 1


def test_the_sum_of_the_singles_beside_all(rows):
    total, beyond = (pick(rows, "all", m) for m in (table.SUM_OF_SINGLES, table.INTERACTION))
    assert total.value == pytest.approx(2.3) and total.ci_high - total.value == pytest.approx(
        stats.t.ppf(0.975, 2) * 0.3 / 3**0.5
    )
    assert beyond.value == pytest.approx((0.5 + 0.0 - 0.2) / 3) and beyond.n == 3


def test_memory_where_a_run_wrote_it(rows):
    assert pick(rows, "all", table.OPTIMIZER_BYTES).value == 1.3e6
    missing = pick(rows, "attention", table.OPTIMIZER_BYTES)
    assert missing.value is None and "wrote no optimizer_state_bytes" in missing.note
    assert missing.note.startswith("not run: ")


def test_published_gaps_name_their_version(rows):
    found = {row.setting: row for row in rows if row.provenance == "published"}
    values = {name: row.value for name, row in found.items()}
    assert values == {
        "full-stack-3b-v1": 1.47,
        "full-stack-3b-v2": 0.838,
        "full-stack-1b-direct": 1.40,
        "full-stack-1b-lora-svd": 0.61,
        "full-stack-1b-all": 0.62,
    }
    assert all(f"version {v} of the abstract" in found[f"full-stack-3b-v{v}"].note for v in (1, 2))


def test_markdown(rows):
    text = table.fullstack_markdown(rows)
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    cells = [cell.strip() for cell in lines["all"].split("|")]
    assert cells[2] == "4.0960" and cells[3].startswith("+2.40 [") and cells[5:7] == ["1.300", "not run"]
    assert "baseline" in lines["bf16"] and "muon_base" in lines["muon_all"]
    assert "Cumulative: projections +1.10 [" in text and "Cumulative: optimizer +0.90 [" in text
    assert "alone add up to +2.30 [" in text and "which is +0.10 [" in text
    assert "0.838 %" in text and "1.47 %" in text


def test_missing_runs_are_said(tmp_path):
    folders = [write_run(tmp_path, e, 0, GAPS[e][0]) for e in ("bf16", "projections")]
    runs = load_runs("ablations", "test", ("bf16", "projections", "all"), (0,), folders)
    rows = table.fullstack_rows(runs, [])
    assert pick(rows, "all", VALIDATION_LOSS).note == "not run: seed 0 not run"
    assert pick(rows, "all", table.INTERACTION).value is None
    assert "all together have not run" in table.fullstack_markdown(rows)


# The plan


def test_the_plan_has_what_the_table_names():
    needed = {*table.SINGLES, *(name for order in table.ORDERS for name in order), table.MUON_BASE}
    assert needed <= set(PLAN)
    seen = set()
    for name, entry in PLAN.items():
        assert set(entry) <= {"group", "base", "baseline", "replace", "note"}
        assert entry["base"] in seen or entry["base"] in recipe_names(), f"{name} builds on what is below it"
        assert entry.get("baseline", "bf16") == table.baseline_of(name)
        LoraSVD(**entry.get("replace", {}).get("lora_svd", {}))
        seen.add(name)


def test_orders_of_the_plan_add_one_module_a_step():
    fields = {"lora_svd": "projections", "attention": "attention", "optimizer": "optimizer"}

    def modules(name):
        entry = PLAN[name]
        own = {fields[field] for field in entry.get("replace", {})}
        return own | modules(entry["base"]) if entry["base"] not in recipe_names() else own

    assert [modules(name) for name in table.SINGLES] == [{name} for name in table.SINGLES]
    for order in table.ORDERS:
        assert [len(modules(name)) for name in order] == [1, 2, 3]
        assert all(modules(a) < modules(b) for a, b in pairwise(order))
