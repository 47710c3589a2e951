"""A published folder agrees with itself, and one changed digit is named with its cell."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from fp4repro import publish as publishing
from fp4repro.ablations import load_ablations
from fp4repro.config import load_scale
from fp4repro.errors import Fp4ReproError
from fp4repro.report import formats, schema
from fp4repro.report.latex import escape, latex_tables, markdown_tables
from fp4repro.report.plan import plans
from fp4repro.report.published import load_published
from fp4repro.report.questions import write_questions
from fp4repro.report.registry import TABLES
from fp4repro.report.schema import Row, write_rows
from fp4repro.verify import verify

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789ab"
WHERE = {"scale": "one", "device": "CPU", "torch": "2", "commit": COMMIT}
CONFIGS = [ROOT / "configs" / f"{name}.yaml" for name in ("published", "benchmarks", "ablations")]
PLAN = {"branches": ["nvfp4", "no_sr"], "scratch": ["late_end"]}
RECOMPUTED = [name for name, table in TABLES.items() if table.rows]
HELD = [*RECOMPUTED, "formats"]  # one of the studies, which are measurements themselves


def write_run(folder: Path, experiment: str, recipe: str, seed: int, loss: float) -> None:
    """Metrics and a curve, which the ablations read."""
    values = {"validation_loss": loss, "validation_loss_bf16": 4 + loss / 31, "diverged": 0}
    values |= {"bits_per_byte": 2 + loss / 9, "tokens": 2048, "parameters": 10}
    rows = [
        Row(
            experiment=experiment,
            setting=schema.run_setting(recipe, seed),
            metric=metric,
            value=value,
            unit=schema.UNITS[metric],
            n=1,
            **WHERE,
        )
        for metric, value in values.items()
    ]
    write_rows(folder / "metrics.csv", rows)
    curve = [f"{step},{loss + seed / step!r}\n" for step in range(1, 9)]
    (folder / "curve.csv").write_text("step,train_loss\n" + "".join(curve))


def write_results(results: Path, scale) -> None:
    """Raw rows of every experiment, and the tables made from them."""
    plan = scale.pretrain
    for place, recipe in enumerate(plan.recipes):
        for seed in plan.seeds:
            folder = results / "pretrain" / recipe / f"seed-{seed}"
            write_run(folder, "pretrain", recipe, seed, 4 + place / 30 + seed / 7)
    for protocol in plans(scale, load_ablations()):
        for place, folder in enumerate(protocol.folders()):
            experiment, name, seed = folder.split("/")
            if experiment != "pretrain":
                loss = 4 + place / 29
                write_run(results / folder, experiment, name, int(seed.removeprefix("seed-")), loss)
    generator = np.random.default_rng(0)
    for model in scale.evals.models:
        rows = [
            (model, recipe, "heldout_cloze", f"q{i}", "acc", float(generator.random() < 0.3), 1.0, 0.1)
            for recipe in ("bf16", "nvfp4")
            for i in range(41)
        ]
        folder = results / "evals" / model
        write_questions(folder / "questions.csv", rows)
        about = {"model": model, "recipes": ["bf16", "nvfp4"], "not_run": {}, **WHERE}
        (folder / "evals.json").write_text(json.dumps(about))
    data = ("gaussian", "weights")
    study = [
        Row(
            experiment=formats.EXPERIMENT,
            setting=formats.setting("nvfp4-1x16", kind),
            metric=metric,
            value=0.5,
            unit=unit,
            n=1,
            **WHERE,
        )
        for kind in data
        for metric, unit in formats.UNITS.items()
    ]
    write_rows(results / "tables" / "formats.csv", study)
    published = load_published(CONFIGS[0])
    for name in HELD:
        table = TABLES[name]
        rows = study if table.rows is None else table.rows(results, scale, published)
        write_rows(results / "tables" / f"{name}.csv", rows)
        (results / "tables" / f"{name}.md").write_text(table.markdown(rows, scale, results))
    for left in ("logs/a.log", "benchmarks/a.tsv", "data/train.bin", "pretrain/bf16/model.safetensors"):
        (results / left).parent.mkdir(parents=True, exist_ok=True)
        (results / left).write_text("x")
    (results / "figures").mkdir()
    (results / "figures" / "pretrain.svg").write_text("<svg/>")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("publish")
    settings = yaml.safe_load((ROOT / "configs" / "scales" / "smoke.yaml").read_text())
    settings |= {"scale": "one", "ablations": PLAN}
    (folder / "one.yaml").write_text(yaml.safe_dump(settings))
    scale = load_scale(folder / "one.yaml")
    write_results(folder / "results", scale)
    configs = [folder / "one.yaml", *CONFIGS]
    publishing.publish(folder / "results", scale, configs, folder / "published", COMMIT)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole / "published", tmp_path / "published")


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_folder_agrees_with_itself_and_holds_what_it_needs(folder):
    verdict = verify(folder)
    assert verdict.faults == ()
    assert set(verdict.recomputed) == {"pretrain", "evals", "evals_paired", "ablations"}
    assert verdict.measured == ("formats",) and verdict.unknown == ()
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names >= {"manifest.json", "environment.json", "configs/one.yaml", "configs/published.yaml"}
    assert names >= {f"tables/{table}.{suffix}" for table in HELD for suffix in ("csv", "md", "tex")}
    assert names >= {"figures/pretrain.svg", "pretrain/bf16/seed-0/metrics.csv"}
    assert not any(name.endswith((".bin", ".safetensors", ".log", ".tsv")) for name in names)
    assert "torch" in json.loads((folder / "environment.json").read_text())["packages"]


@pytest.mark.parametrize("place", [1, -2])  # the first and the last digit of a value
@pytest.mark.parametrize("name", RECOMPUTED)
def test_one_digit_of_a_table_is_named_with_its_cell(folder, name, place):
    path = folder / "tables" / f"{name}.csv"
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if i and len(line.split(",")[3]) > 6)
    cells = lines[number].split(",")
    digits = list(cells[3])
    spot = place if digits[place].isdigit() else place + 1
    digits[spot] = str((int(digits[spot]) + 1) % 10)
    lines[number] = ",".join([*cells[:3], "".join(digits), *cells[4:]])
    path.write_text("\n".join(lines) + "\n")
    found = [fault for fault in verify(folder).faults if fault.startswith(f"tables/{name}.csv,")]
    (fault,) = found
    assert f"line {number + 1} ({cells[1]}, {cells[2]}), column value" in fault
    assert "".join(digits) in fault and cells[3] in fault


@pytest.mark.parametrize("suffix", ["md", "tex"])
def test_one_digit_of_what_a_reader_sees_is_named(folder, suffix):
    change(folder / "tables" / f"pretrain.{suffix}", "4.0714", "4.0715")
    first, *rest = verify(folder).faults
    assert first.startswith(f"tables/pretrain.{suffix}, line ")
    assert "column 2: says 4.0715" in first and "the raw rows give 4.0714" in first
    assert rest == [f"tables/pretrain.{suffix}: is not what its checksum says"]


def test_a_changed_raw_row_changes_its_tables(folder):
    change(folder / "evals" / "nvfp4" / "seed-0" / "questions.csv", "acc,0.0,", "acc,1.0,")
    faults = verify(folder).faults
    assert any(fault.startswith("tables/evals.csv, line") for fault in faults)
    assert "evals/nvfp4/seed-0/questions.csv: is not what its checksum says" in faults


def test_a_changed_measurement_shows_in_its_markdown(folder):
    change(folder / "tables" / "formats.csv", "sqnr_db,0.5", "sqnr_db,0.7")
    faults = verify(folder).faults
    assert any(fault.startswith("tables/formats.md, line") and "0.50" in fault for fault in faults)


def test_files_missing_added_and_unknown(folder):
    (folder / "figures" / "pretrain.svg").unlink()
    (folder / "notes.txt").write_text("mine")
    shutil.copy(folder / "tables" / "formats.csv", folder / "tables" / "mine.csv")
    verdict = verify(folder)
    assert verdict.unknown == ("mine",)
    assert "figures/pretrain.svg: is missing" in verdict.faults
    assert "notes.txt: has no checksum" in verdict.faults


def test_tables_that_a_scale_lacks_are_left_out(whole, tmp_path):
    results = shutil.copytree(whole / "results", tmp_path / "results")
    for suffix in ("csv", "md"):
        (results / "tables" / f"ablations.{suffix}").unlink()
    configs = [whole / "one.yaml", *CONFIGS]
    publishing.publish(results, load_scale(configs[0]), configs, tmp_path / "published", COMMIT)
    verdict = verify(tmp_path / "published")
    assert set(verdict.recomputed) == {"pretrain", "evals", "evals_paired"}
    assert verdict.measured == ("formats",) and verdict.faults == ()


def test_ablations_are_those_of_the_folder(folder):
    change(folder / "configs" / "ablations.yaml", "Without stochastic rounding", "With less rounding")
    faults = [fault for fault in verify(folder).faults if "With less rounding" in fault]
    assert {fault.split(",")[0] for fault in faults} == {
        f"tables/ablations.{s}" for s in ("csv", "md", "tex")
    }


def test_noise_of_another_machine_is_no_fault_where_the_checksum_is_right(folder):
    path = folder / "tables" / "pretrain.csv"
    rows = schema.parse_rows(path)
    number, row = next((i, r) for i, r in enumerate(rows) if r.metric == "bits_per_byte" and r.value != 2)
    changed = {f: getattr(row, f) for f in schema.COLUMNS} | {"value": row.value * (1 + 1e-13)}
    write_rows(path, [*rows[:number], Row(**changed), *rows[number + 1 :]])
    assert any("column value" in fault for fault in verify(folder).faults)
    old = publishing.read_checksums(folder)["tables/pretrain.csv"]
    change(folder / "checksums.txt", old, publishing.sha256(path))
    assert verify(folder).faults == ()


def test_a_folder_that_is_none_is_a_sentence(tmp_path, folder, whole):
    with pytest.raises(Fp4ReproError, match=r"has no manifest\.json"):
        verify(tmp_path)
    scale = load_scale(whole / "one.yaml")
    with pytest.raises(Fp4ReproError, match="is there already"):
        publishing.publish(whole / "results", scale, [], folder, COMMIT)


def test_the_commit_of_a_folder_is_its_tables(whole, tmp_path):
    assert publishing.commit_of(whole / "results") == COMMIT
    with pytest.raises(Fp4ReproError, match="no table to publish"):
        publishing.commit_of(tmp_path)
    rows = schema.parse_rows(whole / "results" / "tables" / "formats.csv")
    other = {f: getattr(rows[0], f) for f in schema.COLUMNS} | {"commit": "fedcba987654"}
    write_rows(tmp_path / "tables" / "formats.csv", [*rows, Row(**other)])
    with pytest.raises(Fp4ReproError, match="of the commits 0123456789ab and fedcba987654"):
        publishing.commit_of(tmp_path)


def test_markdown_becomes_booktabs():
    text = "# Title\n\n**Part 50 %**\n\n| a_b | c |\n| --- | - |\n| 1 ± 2 | x & y |\n\nend\n"
    assert list(markdown_tables(text)) == [("Part 50 %", [["a_b", "c"], ["1 ± 2", "x & y"]])]
    assert latex_tables(text).splitlines() == [
        "% Part 50 %",
        r"\begin{tabular}{ll}",
        r"\toprule",
        r"a\_b & c \\",
        r"\midrule",
        r"1 $\pm$ 2 & x \& y \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert escape("\\{}") == r"\textbackslash{}\{\}"
