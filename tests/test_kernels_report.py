"""Tables and figure of speed and memory: provenance beside each figure, a peak never as a result."""

from dataclasses import replace

import pytest

from fp4repro.memory.account import Assumptions, account
from fp4repro.memory.tables import account_rows
from fp4repro.report.kernels import MARKDOWN
from fp4repro.report.kernels_figure import _on_fp4_units, kernels_figure
from fp4repro.report.schema import Row
from fp4repro.roofline import tables
from fp4repro.roofline.calibrate import cases, checks, fitted, model_config
from fp4repro.roofline.devices import load_devices
from fp4repro.roofline.recipes import speed_recipe

MEASURED = {"device": "CPU x", "torch": "2", "commit": "c", "note": "8 x 16 x 32; emulated on a CPU"}


def _row(**fields):
    return Row(**({"experiment": "x", "setting": "s", "metric": "m", "value": 1.0, "unit": "ms"} | fields))


@pytest.fixture(scope="module")
def all_tables():
    config = model_config("tiny")
    memory = [_row(setting="operand 8 x 8/nvfp4", metric="padded", unit="B/value", value=0.5625)]
    for name in ("bf16", "nvfp4"):
        found = account(config, speed_recipe(name), Assumptions(tokens=128))
        memory += account_rows(f"nemotron-12b/{name}/ranks-1", found, "a note")
    kernels = [
        _row(setting="tiny/ffn.up/fprop/nvfp4", metric="kernel_time", **MEASURED),
        _row(setting="tiny/ffn.up/fprop/nvfp4", metric="speedup_kernel_to_bf16", unit="x bf16", **MEASURED),
        _row(
            setting="tiny/ffn.up/fprop/nvfp4/native",
            metric="kernel_time",
            **MEASURED | {"value": None, "note": "not run: no CUDA device"},
        ),
    ]
    casts = [_row(setting="copy", metric="rate", unit="GB/s", **MEASURED)]
    return {
        "roofline": list(tables.rows(checks(cases(), fitted()), fitted())),
        "kernels": kernels,
        "casts": casts,
        "memory": memory,
    }


def test_the_headline_keeps_the_levels_and_their_origins_apart(all_tables):
    lines = MARKDOWN["roofline"](all_tables["roofline"]).splitlines()
    for device, over_bf16, over_fp8 in (("GB200", "4x", "2x"), ("GB300", "6x", "3x")):
        (peak,) = [line for line in lines if line.startswith(f"| {device}") and "peak ratio" in line]
        assert over_bf16 in peak and over_fp8 in peak and "a bound, no result" in peak
        for level in ("kernel only", "with quantisation", "end to end"):
            origins = [
                line.split("|")[-2].strip() for line in lines if f"| {device}" in line and level in line
            ]
            assert "modelled" in origins and f"not run: no {device}" in origins
    assert any("end to end" in line and "published" in line for line in lines)


def test_rows_that_were_not_run_say_so(all_tables):
    text = MARKDOWN["kernels"](all_tables["kernels"])
    assert "1 products on FP8 and FP4 units: not run: no CUDA device." in text
    assert "emulated on a CPU" in text


def test_every_figure_has_its_provenance(all_tables):
    for name, rows in all_tables.items():
        text = MARKDOWN[name](rows)
        assert "provenance" in text and text.startswith("# ")


def test_the_figure_is_drawn_the_same_twice(all_tables, tmp_path):
    for name in ("a", "b"):
        kernels_figure(all_tables, tmp_path / f"{name}.png", tmp_path / f"{name}.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert svg == (tmp_path / "b.svg").read_text()
    assert "GB300 peak ratio: a bound" in svg and "(modelled)" in svg and "(published)" in svg


def test_points_of_a_gpu_are_drawn_and_emulated_ones_are_not(all_tables, tmp_path):
    def drawn(rows):
        kernels_figure(all_tables | {"kernels": rows}, tmp_path / "x.png", tmp_path / "x.svg")
        return (tmp_path / "x.svg").read_text()

    emulated = all_tables["kernels"]
    on_gpu = [replace(row, note=row.note.replace("emulated on a CPU", "kernels x")) for row in emulated]
    assert drawn(emulated) != drawn(on_gpu)
    assert not _on_fp4_units(emulated[1]) and _on_fp4_units(on_gpu[1])


def test_published_cases_name_what_exists():
    for entry in cases():
        case = entry.case
        assert case["device"] in load_devices() and model_config(case["model"])
        assert speed_recipe(case["recipe"]).name == case["recipe"]
        assert (entry.unit == "ms") == (case["kind"] == "gemm")
