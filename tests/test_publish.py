"""A published folder agrees with itself, and one changed digit is named with its cell."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from fp4repro import archive
from fp4repro import publish as publishing
from fp4repro import verify as verification
from fp4repro.ablations import load_ablations
from fp4repro.config import load_scale
from fp4repro.errors import Fp4ReproError
from fp4repro.report import formats, schema
from fp4repro.report.claims import VERDICTS, claim_rows, verdict_of
from fp4repro.report.latex import escape, latex_tables, markdown_tables
from fp4repro.report.plan import plans
from fp4repro.report.published import load_published
from fp4repro.report.questions import write_questions
from fp4repro.report.registry import TABLES, planned_tables
from fp4repro.report.schema import Row, parse_rows, write_rows
from fp4repro.verify import verify

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789ab"
WHERE = {"scale": "one", "device": "CPU", "torch": "2", "commit": COMMIT}
REAL = ROOT / "results" / "published" / "2026-12-01-75a402c"
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
    for study in ("fidelity", "sensitivity"):
        (results / study).mkdir()
        text = (REAL / study / "hybrid.csv").read_text().replace("75a402cdb35b", COMMIT)
        (results / study / "hybrid.csv").write_text(text)
    data = ("gaussian", "weights")
    study = [
        Row(
            experiment=formats.EXPERIMENT,
            setting=formats.setting("nvfp4-1x16", kind),
            metric=metric,
            value=0.51234567,
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


@pytest.fixture(autouse=True)
def published_read_once(monkeypatch):
    """Reading the published figures takes most of the time of a verification."""
    monkeypatch.setattr(verification, "load_published", lambda path: _published(path.read_text()))


@functools.cache
def _published(text: str):
    assert text == CONFIGS[0].read_text()
    return load_published(CONFIGS[0])


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
    assert set(verdict.recomputed) == set(RECOMPUTED)
    assert verdict.measured == ("formats",) and verdict.unknown == ()
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names >= {"manifest.json", "environment.json", "configs/one.yaml", "configs/published.yaml"}
    assert names >= {"report.html", "ro-crate-metadata.json", "raw/formats.csv", "fidelity/hybrid.csv"}
    assert names >= {f"tables/{table}.{suffix}" for table in HELD for suffix in ("csv", "md", "tex")}
    assert names >= {"figures/pretrain.svg", "pretrain/bf16/seed-0/metrics.csv"}
    assert not any(name.endswith((".bin", ".safetensors", ".log", ".tsv")) for name in names)
    assert "torch" in json.loads((folder / "environment.json").read_text())["packages"]


# The last digit but one of every table's value, and the first of one.
@pytest.mark.parametrize(("name", "place"), [(name, -2) for name in HELD] + [("pretrain", 1)])
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
    faults = verify(folder).faults
    (fault,) = [fault for fault in faults if fault.startswith(f"tables/{name}.csv,")]
    assert f"line {number + 1} ({cells[1]}, {cells[2]}), column value" in fault
    assert repr(float("".join(digits))) in fault and repr(float(cells[3])) in fault


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
    change(folder / "raw" / "formats.csv", "sqnr_db,0.5", "sqnr_db,0.7")
    faults = verify(folder).faults
    assert any(fault.startswith("tables/formats.md, line") and "0.51" in fault for fault in faults)
    assert any(fault.startswith("tables/formats.csv, line 2") and "0.71234567" in fault for fault in faults)


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
    assert set(verdict.recomputed) == set(RECOMPUTED) - {"ablations"}
    assert verdict.measured == ("formats",) and verdict.faults == ()
    about = json.loads((tmp_path / "published" / "manifest.json").read_text())
    there = {*RECOMPUTED, "formats"} - {"ablations"}
    assert about["missing"] == [name for name in planned_tables(load_scale(configs[0])) if name not in there]
    assert "ablations" in about["missing"] and "claims" not in about["missing"]
    page = (tmp_path / "published" / "report.html").read_text()
    assert "Not in this folder" in page and "<code>ablations</code>" in page


def test_chosen_tables_alone_are_published(whole, tmp_path):
    configs = [whole / "one.yaml", *CONFIGS]
    chosen, out = ["pretrain", "formats"], tmp_path / "published"
    publishing.publish(whole / "results", load_scale(configs[0]), configs, out, COMMIT, chosen)
    assert {path.stem for path in (out / "tables").glob("*.csv")} == {*chosen, "claims"}
    assert verify(out).faults == ()
    with pytest.raises(Fp4ReproError, match="has no table kernels"):
        publishing.commit_of(whole / "results", ["kernels"])


def test_claims_are_bounds_with_a_verdict_from_the_interval():
    def verdicts(low, high, value=1.0):
        ours = Row(
            experiment="pretrain",
            setting="nvfp4",
            metric="gap_to_fp8",
            value=value,
            unit="%",
            ci_low=low,
            ci_high=high,
        )
        said = Row(
            experiment="pretrain",
            setting="nvfp4",
            metric="gap_to_fp8",
            value=1.5,
            unit="%",
            provenance="published",
            note="about 1.5 %: a gap; 12B; a paper",
        )
        (row,) = claim_rows({"pretrain": [ours, said]})
        assert row.value == value and "about 1.5 %" in row.note
        return verdict_of(row)[0]

    assert verdicts(0.5, 1.5) == "supported" and verdicts(0.5, 1.6) == "undecided"
    assert verdicts(1.6, 2.0, 1.8) == "not supported" and verdicts(None, None) == "undecided"


def test_every_claim_of_the_ablations_is_in_the_table_of_claims(whole):
    tables = whole / "published" / "tables"
    rows = parse_rows(tables / "claims.csv")
    assert {verdict_of(row)[0] for row in rows} <= set(VERDICTS)
    said = [r for r in parse_rows(tables / "ablations.csv") if r.metric.startswith("claim_")]
    ours = [row for row in rows if row.setting.startswith("ablations/")]
    assert 2 * len(ours) == len(said) > 0


def test_the_crate_describes_every_file(whole):
    pytest.importorskip("rocrate")
    graph = json.loads((whole / "published" / "ro-crate-metadata.json").read_text())["@graph"]
    described = {entity["@id"] for entity in graph if entity["@type"] == "File"}
    wanted = set(publishing.read_checksums(whole / "published")) - {"ro-crate-metadata.json"}
    assert described == wanted
    (root,) = [entity for entity in graph if entity["@id"] == "./"]
    assert root["license"] and {part["@id"] for part in root["hasPart"]} == wanted


def test_an_archive_is_the_same_bytes_again_and_refuses_a_folder_that_disagrees(folder, tmp_path):
    for name in ("a.zip", "b.zip"):
        archive.write_archive(folder, tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    shutil.unpack_archive(tmp_path / "a.zip", tmp_path / "unpacked")
    assert verify(tmp_path / "unpacked" / folder.name).faults == ()
    change(folder / "tables" / "formats.csv", "sqnr_db,0.5", "sqnr_db,0.7")
    with pytest.raises(Fp4ReproError, match=r"formats\.csv, line"):
        archive.write_archive(folder, tmp_path / "c.zip")
    assert not (tmp_path / "c.zip").exists()


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
