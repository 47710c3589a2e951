"""Schema, runs, tables, figure and check of the report, on runs with known losses."""

import base64
import io
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from fontTools.ttLib import TTFont
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fp4repro.config import read_yaml
from fp4repro.errors import Fp4ReproError
from fp4repro.report.__main__ import main
from fp4repro.report.check import check_pretrain
from fp4repro.report.figures import pretrain_figure
from fp4repro.report.markdown import pretrain_markdown
from fp4repro.report.published import load_published
from fp4repro.report.runs import load_runs
from fp4repro.report.schema import (
    BITS_PER_BYTE,
    DIVERGED,
    PARAMETERS,
    TOKENS,
    UNITS,
    VALIDATION_LOSS,
    Row,
    parse_rows,
    read_rows,
    run_setting,
    split_setting,
    write_rows,
)
from fp4repro.report.tables import pretrain_rows

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "configs" / "published.yaml"
LOSSES = {
    "bf16": {0: 4.0, 1: 4.2, 2: 3.9},
    "fp8": {0: 4.01, 1: 4.19, 2: 3.92},
    "nvfp4": {0: 4.06, 1: 4.28, 2: 3.95},
    "mxfp4": {0: 4.1, 1: 4.3, 2: 4.01},
}
SEEDS = (0, 1, 2)


def row(**changes) -> Row:
    base = {"experiment": "e", "setting": "s", "metric": "m", "value": 1.0, "unit": "u"}
    return Row(**(base | changes))


def write_run(folder: Path, recipe: str, seed: int, loss: float | None, scale="test") -> Path:
    """A run's files as the training stage leaves them; a loss of None is a run that diverged."""
    out = folder / recipe / f"seed-{seed}"
    out.mkdir(parents=True)
    why = "" if loss is not None else "diverged: training loss is nan at step 7"
    values = {
        VALIDATION_LOSS: loss,
        BITS_PER_BYTE: loss and loss / 2.5,
        TOKENS: 40960,
        PARAMETERS: 5_000_000,
        DIVERGED: int(loss is None),
    }
    rows = [
        Row(
            experiment="pretrain",
            setting=run_setting(recipe, seed),
            metric=metric,
            value=value,
            unit=UNITS[metric],
            n=1,
            device="CPU",
            scale=scale,
            torch="2.13.0",
            commit="abc",
            note=why if value is None or metric == DIVERGED else "",
        )
        for metric, value in values.items()
    ]
    write_rows(out / "metrics.csv", rows)
    lines = [f"{i},{i * 1024},{'' if i % 2 else (loss or 5) + 1 / i}" for i in range(1, 41)]
    text = "\n".join(["step,tokens,validation_loss", *lines]) + "\n"
    (out / "curve.csv").write_text(text, encoding="utf-8")
    return out


@pytest.fixture
def folders(tmp_path):
    return [
        write_run(tmp_path / "runs", recipe, seed, loss)
        for recipe, losses in LOSSES.items()
        for seed, loss in losses.items()
    ]


def load(folders, recipes=tuple(LOSSES), seeds=SEEDS):
    return load_runs("pretrain", "test", recipes, seeds, folders)


def table(runs):
    return pretrain_rows(runs, load_published(PUBLISHED))


def pick(rows, setting, metric) -> Row:
    (found,) = [r for r in rows if (r.setting, r.metric) == (setting, metric) and r.provenance == "measured"]
    return found


# --- schema ---


@given(value=st.floats(allow_nan=False, allow_infinity=False), note=st.text("ab,\"';\n é", max_size=9))
def test_rows_read_back_to_the_same_bits(tmp_path_factory, value, note):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    rows = [
        row(value=value, ci_low=-value, ci_high=value, n=3, note=note),
        row(value=np.float32(0.1)),
    ]
    write_rows(path, rows)
    assert parse_rows(path) == rows
    assert math.copysign(1, parse_rows(path)[0].value) == math.copysign(1, value)


def test_other_readers_see_the_schema(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(path, [row(), row(value=None, note="not run: no CUDA device")])
    frame = pd.read_csv(path)
    assert " ".join(frame.columns) == (
        "experiment setting metric value unit ci_low ci_high n provenance device scale torch commit note"
    )
    assert np.isnan(frame.value[1])
    ours = read_rows([path, path])
    assert len(ours) == 4
    assert ours.value.dtype == "float64"
    assert list(ours.note[:2]) == ["", "not run: no CUDA device"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"value": math.nan}, "value is nan"),
        ({"value": math.inf}, "value is inf"),
        ({"ci_low": -math.inf, "ci_high": 1.0}, "ci_low is -inf"),
        ({"ci_low": 1.0}, "both ends"),
        ({"value": None}, "does not say why"),
        ({"provenance": "guessed"}, "'guessed', not one of measured"),
        ({"setting": ""}, "must not be empty"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(changes, said):
    with pytest.raises(Fp4ReproError, match=said):
        row(**changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("commit", "comit"), "missing commit and has the unknown comit"),
        (lambda text: text.replace(",note", "", 1), "missing note"),
        (lambda text: text.replace("note\n", "note,more\n", 1), "unknown more"),
        (lambda text: text[:-1], "truncated"),
        (lambda text: text[: text.rindex(",")] + "\n", "13 cells where the schema has 14"),
        (lambda text: text.splitlines()[0] + "\n", "header and no rows"),
        (lambda text: "", "truncated"),
        (lambda text: "\n", "missing"),
        (lambda text: text.replace("measured", "modeled"), "line 2.*'modeled'"),
        (lambda text: text.replace("1.0", "one"), "line 2.*one"),
    ],
)
def test_a_file_that_is_not_whole_or_not_ours_is_refused(tmp_path, change, said):
    path = tmp_path / "rows.csv"
    write_rows(path, [row()])
    path.write_text(change(path.read_text()))
    with pytest.raises(Fp4ReproError, match=said):
        parse_rows(path)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(Fp4ReproError, match="does not exist"):
        parse_rows(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Fp4ReproError, match="UTF-8"):
        parse_rows(tmp_path / "binary.csv")


def test_settings_of_runs():
    assert split_setting(run_setting("nvfp4", 12)) == ("nvfp4", 12)
    for wrong in ("nvfp4", "/seed-1", "nvfp4/seed-", "nvfp4/seed-x"):
        with pytest.raises(Fp4ReproError, match="not that of a run"):
            split_setting(wrong)


# --- published figures ---


def test_derived_gaps_follow_from_the_losses_beside_them():
    derived = [entry for entry in load_published(PUBLISHED) if entry.losses]
    assert len(derived) >= 8
    for entry in derived:
        ours, theirs = entry.losses
        decimals = len(str(entry.value).partition(".")[2])
        assert round(100 * (ours / theirs - 1), decimals) == entry.value, entry.id
    for entry in load_published(PUBLISHED):
        assert entry.losses or entry.confidence != "derived", entry.id


def test_the_headline_figures_are_there():
    values = {entry.id: (entry.relation, entry.value) for entry in load_published(PUBLISHED)}
    assert values["nvfp4-12b-stable"] == ("<", 1.0)
    assert values["nvfp4-12b-final"] == (">", 1.5)
    assert values["mxfp4-8b"] == ("about", 2.5)
    assert values["mmlu-pro-12b-nvfp4"] == ("=", 62.58)
    assert values["full-stack-3b-v1"][1] != values["full-stack-3b-v2"][1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e.pop("source"), "source"),
        (lambda e: e.update(confidence="sure"), "sure"),
        (lambda e: e.update(valeu=1), "valeu"),
        (lambda e: e.update(value="1.5"), "1.5"),
        (lambda e: e.update(id="nvfp4-12b-final"), "more than once"),
    ],
)
def test_a_published_file_with_a_mistake_is_refused(tmp_path, change, said):
    entries = read_yaml(PUBLISHED)
    change(entries[0])
    path = tmp_path / "published.yaml"
    path.write_text(yaml.safe_dump(entries))
    with pytest.raises(Fp4ReproError, match=said):
        load_published(path)


# --- tables ---


def test_table_against_scipy(folders):
    rows = table(load(folders))
    for recipe, losses in LOSSES.items():
        loss = pick(rows, recipe, VALIDATION_LOSS)
        values = np.array([losses[seed] for seed in SEEDS])
        assert loss.value == pytest.approx(values.mean())
        assert (loss.n, loss.device, loss.torch, loss.commit) == (3, "CPU", "2.13.0", "abc")
        assert pick(rows, recipe, BITS_PER_BYTE).value == pytest.approx(values.mean() / 2.5)
        for baseline in {"bf16", "fp8"} - {recipe}:
            base = np.array([LOSSES[baseline][seed] for seed in SEEDS])
            gap = pick(rows, recipe, f"gap_to_{baseline}")
            relative = 100 * (values / base - 1)
            low, high = stats.ttest_1samp(relative, 0).confidence_interval(0.95)
            assert gap.value == pytest.approx(relative.mean())
            assert (gap.ci_low, gap.ci_high) == (pytest.approx(low), pytest.approx(high))
    assert pick(rows, "nvfp4", "gap_to_bf16").value > 0
    assert not [r for r in rows if r.setting == r.metric.removeprefix("gap_to_")]


def test_table_holds_the_published_gaps_of_its_recipes_only(folders):
    published = [r for r in table(load(folders)) if r.provenance == "published"]
    assert {r.setting for r in published} == {"nvfp4", "mxfp4"}
    assert any("arXiv:2509.25149" in r.note and r.metric == "gap_to_fp8" for r in published)
    fewer = table(load(folders[:9], recipes=("bf16", "fp8", "nvfp4")))
    assert {r.setting for r in fewer if r.provenance == "published"} == {"nvfp4"}


def test_a_diverged_and_a_missing_run_are_named_and_left_out_of_both_sides(tmp_path, folders):
    write_run(tmp_path / "again", "fp8", 1, None)
    kept = [f for f in folders if (f.parent.name, f.name) not in {("fp8", "seed-1"), ("mxfp4", "seed-0")}]
    rows = table(load([*kept, tmp_path / "again" / "fp8" / "seed-1"]))
    fp8 = pick(rows, "fp8", VALIDATION_LOSS)
    assert (fp8.n, fp8.value) == (2, pytest.approx((4.01 + 3.92) / 2))
    assert "seed 1 diverged: training loss is nan at step 7" in fp8.note
    diverged = pick(rows, "fp8", DIVERGED)
    assert (diverged.value, diverged.n) == (1, 3)
    gap = pick(rows, "mxfp4", "gap_to_fp8")  # seed 2 alone has both
    assert (gap.n, gap.ci_low, gap.value) == (1, None, pytest.approx(100 * (4.01 / 3.92 - 1)))
    assert "seed 0 not run" in gap.note
    assert "seed 1 diverged" in gap.note
    assert "one seed" in gap.note
    assert pick(rows, "nvfp4", "gap_to_bf16").n == 3


def test_a_recipe_without_any_run_stays_in_the_table(tmp_path, folders):
    kept = [f for f in folders if f.parent.name not in ("mxfp4", "fp8")]
    kept += [write_run(tmp_path / "again", "fp8", seed, None) for seed in SEEDS]
    rows = table(load(kept))
    empty = pick(rows, "mxfp4", VALIDATION_LOSS)
    assert empty.value is None
    assert empty.note == "not run: seeds 0, 1, 2 not run"
    assert pick(rows, "fp8", VALIDATION_LOSS).note.startswith("seeds 0, 1, 2 diverged")
    assert pick(rows, "nvfp4", "gap_to_fp8").value is None
    text = pretrain_markdown(rows, 3)
    assert re.search(r"\| mxfp4 +\| not run +\|", text)
    assert re.search(r"\| fp8 +\| diverged +\|", text)
    assert "- mxfp4: seeds 0, 1, 2 not run." in text


def test_a_baseline_that_the_scale_does_not_plan_is_said(folders):
    rows = table(load(folders[6:9], recipes=("nvfp4",)))
    gap = pick(rows, "nvfp4", "gap_to_bf16")
    assert gap.value is None
    assert gap.note.startswith("not run: bf16 is not among the recipes")


def test_one_seed_has_no_interval_and_says_so(folders):
    rows = table(load([f for f in folders if f.name == "seed-0"], seeds=(0,)))
    gap = pick(rows, "nvfp4", "gap_to_bf16")
    assert (gap.n, gap.ci_low, gap.ci_high, gap.note) == (1, None, None, "no interval: one seed")
    assert "+1.50 (no interval: one seed)" in pretrain_markdown(rows, 1)


def test_runs_out_of_place_are_refused(tmp_path, folders):
    with pytest.raises(Fp4ReproError, match="does not plan"):
        load(folders, seeds=(0, 1))
    with pytest.raises(Fp4ReproError, match="is in both"):
        load([*folders, write_run(tmp_path / "again", "bf16", 0, 4.0)])
    with pytest.raises(Fp4ReproError, match="scale 'other'"):
        load([write_run(tmp_path / "other", "bf16", 0, 4.0, scale="other")])


def test_markdown_shows_sign_interval_source_and_setting(folders):
    rows = table(load(folders))
    text = pretrain_markdown(rows, 3)
    gap = pick(rows, "nvfp4", "gap_to_bf16")
    assert f"{gap.value:+.2f} [{gap.ci_low:+.2f}, {gap.ci_high:+.2f}]" in text
    assert "positive means worse" in text
    assert "40,960 training tokens" in text
    assert "5,000,000 parameters; device CPU; torch 2.13.0; commit abc" in text
    assert "emulated" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(LOSSES)
    assert len({len(line) for line in lines}) == 1
    for number in re.findall(r"\[(\d+)\]", "".join(lines)):
        assert re.search(rf"^{number}\. .*(arXiv|Quartet)", text, re.MULTILINE), number


def test_runs_of_different_commits_are_both_named(tmp_path, folders):
    path = folders[0] / "metrics.csv"
    write_rows(path, [replace(r, commit="def") for r in parse_rows(path)])
    assert pick(table(load(folders)), "bf16", VALIDATION_LOSS).commit == "abc and def"


# --- figure ---


def test_figure_is_the_same_bytes_again_and_keeps_its_text(tmp_path, folders):
    runs = load(folders)
    for name in ("a", "b"):
        pretrain_figure(runs, table(runs), tmp_path / f"{name}.png", tmp_path / f"{name}.svg")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    svg = (tmp_path / "a.svg").read_text()
    assert svg == (tmp_path / "b.svg").read_text()
    assert "<text" in svg
    assert ">nvfp4<" in svg
    assert "<dc:date>" not in svg
    pdf = (tmp_path / "a.pdf").read_bytes()
    assert pdf == (tmp_path / "b.pdf").read_bytes() and b"/CreationDate" not in pdf
    # Fonts are inside: TrueType outlines in the PDF, the letters that are used in the SVG.
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf
    fonts = re.findall(r"font-weight:(\w+);src:url\(data:font/woff;base64,([^)]+)\)", svg)
    assert [weight for weight, _ in fonts] == ["bold", "normal"]
    letters = [set(TTFont(io.BytesIO(base64.b64decode(font))).getBestCmap()) for _, font in fonts]
    assert set(map(ord, "Validation loss")) <= letters[0] and set(map(ord, "nvfp4")) <= letters[1]
    assert ord("Z") not in letters[0] | letters[1]


def test_figure_follows_the_results(tmp_path, folders):
    runs = load(folders)
    pretrain_figure(runs, table(runs), tmp_path / "a.png", tmp_path / "a.svg")
    few = load([f for f in folders if f.parent.name != "mxfp4"])
    pretrain_figure(few, table(few), tmp_path / "b.png", tmp_path / "b.svg")
    assert "not run" not in (tmp_path / "a.svg").read_text()
    assert "not run" in (tmp_path / "b.svg").read_text()


def test_figure_refuses_a_damaged_curve(tmp_path, folders):
    runs = load(folders)
    curve = folders[0] / "curve.csv"
    for text, said in (
        ("step,tokens\n1,2\n", "lacks the column"),
        ("tokens,validation_loss\n1,x\n", "damaged"),
        ("tokens,validation_loss\n1,2.0\n", "different steps"),
    ):
        curve.write_text(text)
        with pytest.raises(Fp4ReproError, match=said):
            pretrain_figure(runs, table(runs), tmp_path / "a.png", tmp_path / "a.svg")
    curve.unlink()
    with pytest.raises(Fp4ReproError, match="does not exist"):
        pretrain_figure(runs, table(runs), tmp_path / "a.png", tmp_path / "a.svg")
    assert not list(tmp_path.glob("*.png"))


# --- check ---


def check(path, rows, seeds=SEEDS):
    write_rows(path, rows)
    check_pretrain(path, "test", tuple(LOSSES), seeds)


def test_check_passes_a_whole_table(tmp_path, folders):
    check(tmp_path / "table.csv", table(load(folders)))


@pytest.mark.parametrize(
    ("setting", "metric", "change", "said"),
    [
        ("mxfp4", VALIDATION_LOSS, None, "mxfp4 has no measured validation_loss"),
        ("nvfp4", "gap_to_fp8", None, "nvfp4 has no measured gap_to_fp8"),
        ("nvfp4", "gap_to_bf16", {"ci_low": None, "ci_high": None}, "lacks its interval"),
        ("nvfp4", "gap_to_bf16", {"ci_low": 9.0, "ci_high": 9.5}, "outside its interval"),
        ("fp8", BITS_PER_BYTE, {"value": None, "note": "not run: x"}, r"is empty \(not run: x\)"),
        ("bf16", VALIDATION_LOSS, {"n": 2}, "2 of 3 seeds"),
        ("fp8", DIVERGED, {"value": 1}, "1 of the 3 runs of fp8 diverged"),
        ("fp8", VALIDATION_LOSS, {"scale": "laptop"}, "no measured validation_loss at scale test"),
        ("fp8", VALIDATION_LOSS, {"provenance": "modelled"}, "no measured validation_loss"),
    ],
)
def test_check_names_what_is_wrong(tmp_path, folders, setting, metric, change, said):
    rows = []
    for r in table(load(folders)):
        hit = (r.setting, r.metric, r.provenance) == (setting, metric, "measured")
        if not hit:
            rows.append(r)
        elif change is not None:
            rows.append(replace(r, **change))
    with pytest.raises(Fp4ReproError, match=said) as error:
        check(tmp_path / "table.csv", rows)
    assert len(str(error.value).splitlines()) == 1


def test_check_refuses_nan_and_missing_published_rows(tmp_path, folders):
    rows = table(load(folders))
    path = tmp_path / "table.csv"
    with pytest.raises(Fp4ReproError, match="no published gap"):
        check(path, [r for r in rows if r.provenance == "measured"])
    write_rows(path, rows)
    loss = repr(pick(rows, "bf16", VALIDATION_LOSS).value)
    path.write_text(path.read_text().replace(loss, "nan", 1))
    with pytest.raises(Fp4ReproError, match="value is nan"):
        check_pretrain(path, "test", tuple(LOSSES), SEEDS)


# --- command line ---


def test_commands_write_and_check_what_the_scale_file_plans(tmp_path, monkeypatch, capsys):
    scale = read_yaml(ROOT / "configs" / "scales" / "smoke.yaml")
    plan = scale["pretrain"]
    runs = [
        write_run(tmp_path / "runs", recipe, seed, LOSSES[recipe][seed], scale="smoke")
        for recipe in plan["recipes"]
        for seed in plan["seeds"]
    ]

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fp4repro.report", *map(str, arguments)])
        main()

    files = {name: tmp_path / "out" / f"pretrain.{name}" for name in ("csv", "md", "png", "svg")}
    of_scale = ("--scale", ROOT / "configs" / "scales" / "smoke.yaml")
    given = (*of_scale, "--runs", *runs, "--table", files["csv"])
    run("pretrain", *given, "--published", PUBLISHED, "--markdown", files["md"])
    run("figure", *given, "--png", files["png"], "--svg", files["svg"])
    run("check", files["csv"], *of_scale)
    assert "complete and finite" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {path.name for path in files.values()} | {"pretrain.pdf"}
    assert files["png"].read_bytes().startswith(b"\x89PNG")
