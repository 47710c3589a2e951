"""The GEMM and cast benchmarks at tiny sizes: emulation for real, the GPU's part with stand-ins.

The GPU's calls are checked for shapes and layouts on the meta device; its timing with events that count.
"""

import math
import sys
from dataclasses import replace

import pytest
import torch
from eagerly import run_eagerly

from fp4repro import quantize
from fp4repro.bench import __main__ as stage
from fp4repro.bench import casts, cuda, gemm, gemm_rows
from fp4repro.bench.gemm import Machine, Result, geometric_mean, measure, model_gemms
from fp4repro.bench.kernel_names import fault, operand_of
from fp4repro.bench.products import BF16, COMPARED, blocks_of_128, mx, row_wise, tensor_wise
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.errors import run_stage
from fp4repro.models import ModelConfig
from fp4repro.report.schema import parse_rows
from fp4repro.roofline.calibrate import model_config
from fp4repro.roofline.gemm import Gemm

CPU = Machine(torch.device("cpu"), None)
WHERE = {"device": "CPU somebody's", "torch": "2", "commit": "abc"}
SMALL = ModelConfig(pattern="-", width=128, vocabulary=128, ffn_width=256)
BY_NAME = {compared.name: compared for compared in COMPARED}


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch):
    run_eagerly(monkeypatch)


@pytest.fixture(scope="module")
def emulated():
    with pytest.MonkeyPatch.context() as patch:
        run_eagerly(patch)
        return list(measure(SMALL, 128, 2, CPU))


def test_products_are_those_of_the_models_linears():
    found = {(g.linear, g.product): (g.m, g.n, g.k, count) for g, count in model_gemms(SMALL, 384)}
    assert found["ffn.up", "fprop"] == (384, 256, 128, 1)
    assert found["ffn.up", "dgrad"] == (384, 128, 256, 1)
    assert found["ffn.up", "wgrad"] == (256, 128, 384, 1)
    assert {c for g, c in model_gemms(model_config("nemotron-12b"), 128) if g.linear == "attention.o"} == {6}


def test_emulation_gives_times_errors_and_says_that_it_is_one(emulated):
    assert len(emulated) == 6 * len(COMPARED)
    for result in emulated:
        assert result.kernel[0] > 0 and result.quantised[0] > 0
        assert result.note == gemm.EMULATED
        assert result.errors["error_of_kernel"] < 0.004  # one rounding to BF16
    of = {r.compared.name: r.errors["error"] for r in emulated if r.gemm.product == "fprop"}
    assert of["bf16"] < of["mxfp8"] < of["nvfp4"]
    assert 0.1 < of["nvfp4"] < 0.2 and 0.02 < of["fp8-tensor"] < 0.06


def test_rows_of_a_cpu_say_not_run_for_the_units(emulated):
    rows = list(gemm_rows.rows("small", emulated, CPU, WHERE))
    native = [row for row in rows if row.setting.endswith("/native")]
    assert len(native) == len(emulated) and all(row.note == "not run: no CUDA device" for row in native)
    timed = [row for row in rows if row.metric == "kernel_time" and row.value is not None]
    assert all(gemm.EMULATED in row.note and row.ci_low <= row.value <= row.ci_high for row in timed)
    assert not any(row.metric == "share_of_peak" for row in rows)  # a CPU has no peak in the table


def test_sums_count_each_linear_as_often_as_it_stands():
    def result(name, seconds, count):
        timing = (seconds, seconds, seconds)
        found = Result(Gemm(f"l{count}", "fprop", 1, 1, 1), BY_NAME[name], count)
        found.kernel = found.quantised = timing
        found.errors = {}
        return found

    results = [result("bf16", 4, 1), result("nvfp4", 1, 1), result("bf16", 1, 3), result("nvfp4", 1, 3)]
    rows = {row.metric: row for row in gemm_rows.rows("m", results, CPU, WHERE) if "/all/" in row.setting}
    assert rows["speedup_kernel_geometric_mean"].value == pytest.approx(2)
    assert rows["speedup_kernel_sum"].value == pytest.approx((4 + 3 * 1) / (1 + 3 * 1))
    assert geometric_mean([1, 4]) == pytest.approx(2)


def test_a_product_too_large_for_a_cpu_is_not_run():
    large = Gemm("x", "fprop", 8192, 8192, 8192)
    assert "too much for a CPU" in CPU.why_not(BF16, large)
    assert CPU.why_not(BF16, replace(large, m=16)) == ""


# --- what a GPU would run ---


def _on_meta(q: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(q.codes.to("meta"), q.scales.to("meta"), q.amax.to("meta"), q.format, q.shape)


@pytest.mark.parametrize(
    ("name", "multiply"),
    [("fp8-tensor", tensor_wise), ("fp8-row", row_wise), ("fp8-128", blocks_of_128), ("mxfp8", mx)],
)
def test_the_gpus_products_accept_our_layouts_on_the_meta_device(name, multiply):
    compared = BY_NAME[name]
    assert compared.multiply is multiply
    a, b = torch.randn(256, 640), torch.randn(384, 640)
    operands = [_on_meta(q) for q in (quantize(a, compared.a), quantize(b, compared.b))]
    assert multiply(*operands).shape == (256, 384)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-row"])
def test_scaled_products_equal_the_emulation_where_a_cpu_has_them(name):
    compared = BY_NAME[name]
    operands = compared.prepare(torch.randn(64, 128).bfloat16(), torch.randn(48, 128).bfloat16())
    native, emulated = compared.native(operands), compared.emulated(operands)
    assert float((native - emulated).float().norm() / emulated.float().norm()) < 0.005


@pytest.mark.parametrize(
    ("name", "operand"),
    [
        ("sm100_xmma_gemm_e2m1e2m1_bf16_tilesize", "fp4"),
        ("cutlass3x_sm100_bstensorop_ue4m3xe2m1_ue4m3xe2m1", "fp4"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n", "fp8"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "bf16"),
        ("nvjet_sm100_ootst_128x256", "fp4"),
        ("nvjet_qqtst_128x128", "fp8"),
        ("nvjet_tst_192x192", "bf16"),
        ("nvjet_zz_192x192", None),
        ("some_gemm_kernel", None),
    ],
)
def test_a_kernels_name_tells_its_operands(name, operand):
    assert operand_of(name) == operand


def test_a_fall_back_is_reported_and_not_timed():
    fp8 = "sm90_xmma_gemm_e4m3bf16_tn"
    assert fault(["memset", fp8], "fp8") is None
    assert fault([fp8], "fp4") == f"fell back to FP8: kernel {fp8}"
    assert "does not say" in fault(["mystery_gemm"], "fp4")
    assert fault(["elementwise"], "fp4") == "no GEMM kernel was seen"
    # On a machine whose kernels say FP8, the rows of BF16 are not run.
    machine = Machine(torch.device("cpu"), 9, "no FP4", names_of=lambda function: [fp8])
    results = list(measure(SMALL, 128, 1, machine, [BF16, BY_NAME["fp8-tensor"], BY_NAME["nvfp4"]]))
    notes = {r.compared.name: r.note for r in results}
    assert notes["bf16"] == f"not run: fell back to FP8: kernel {fp8}"
    assert notes["fp8-tensor"] == f"kernels {fp8}"
    assert notes["nvfp4"] == "not run: compute capability 9.x has no units for nvfp4"
    rows = list(gemm_rows.rows("small", results, machine, WHERE | {"device": "NVIDIA H200"}))
    shares = [row for row in rows if row.metric == "share_of_peak"]
    assert shares and all(row.note == "peak of H200" and row.setting.endswith("fp8-tensor") for row in shares)


def test_devices_are_known_by_the_drivers_names():
    names = {
        "NVIDIA H200": "H200",
        "NVIDIA H200 NVL": "H200-NVL",
        "NVIDIA GB300": "GB300",
        "NVIDIA B300 SXM6 AC": "B300",
    }
    for driver, name in names.items():
        assert gemm_rows.device_of(driver).name == name
    assert gemm_rows.device_of("NVIDIA A100") is None


def test_a_call_is_timed_between_events_after_a_flush():
    calls = []

    class Fake:
        def flush(self):
            calls.append("flush")

        def keep_busy(self):
            calls.append("busy")

        def record(self):
            calls.append("event")
            return len(calls)

        def seconds(self, start, end):
            return float(end - start)

    measured = cuda.device_seconds(Fake())(lambda: calls.append("run"))
    assert calls == ["flush", "busy", "event", "run", "event"] and measured == 2.0


def test_conditions_without_a_driver_say_unknown(monkeypatch):
    monkeypatch.setattr(cuda.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError))
    found = cuda.conditions()
    assert found["clocks"] == "unknown" and found["torch"] == str(torch.__version__)


# --- casts ---


def test_casts_count_what_is_read_and_stored():
    size = 128
    found = casts.casts(size, torch.device("cpu"))
    assert found[casts.COPY].bytes == 4 * size**2
    packed = size**2 * 9 // 16 + 4
    assert found["quantise 1x16"].bytes == 2 * size**2 + packed
    assert found["both orientations of x, transposed"].bytes == 2 * size**2 + 2 * packed
    timings = casts.measure(found, 2)
    rows = list(casts.rows(found, timings, "note", WHERE))
    of = {(row.setting, row.metric): row.value for row in rows}
    assert all(math.isfinite(row.value) and row.value > 0 for row in rows)
    rate, copy = of["quantise 1x16", "rate"], of[casts.COPY, "rate"]
    assert of["quantise 1x16", "share_of_copy"] == pytest.approx(rate / copy)


# --- the command ---


def test_the_commands_write_rows(tmp_path, monkeypatch, capsys):
    for name, more in (("gemm", ["--model", "tiny", "--tokens", "128"]), ("casts", ["--size", "128"])):
        out = tmp_path / f"{name}.csv"
        monkeypatch.setattr(
            sys, "argv", ["bench", name, *more, "--device", "cpu", "--rounds", "1", "--out", str(out)]
        )
        stage.main()
        assert {row.experiment for row in parse_rows(out)} == {"kernels" if name == "gemm" else "casts"}
    assert "emulated" in parse_rows(out)[0].note
    assert "with quantisation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gemm", "--model", "nano"], "there is no model 'nano'"),
        (["gemm", "--model", "tiny", "--tokens", "100"], "--tokens is 100"),
        (["casts", "--size", "5"], "--size is 5"),
        (["casts", "--rounds", "-1"], "--rounds is -1"),
        (["casts", "--device", "cuda"], "torch finds no CUDA device"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, said, monkeypatch, capsys):
    if torch.cuda.is_available() and "cuda" in arguments:
        pytest.skip("a CUDA device is here")
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as exit:
        run_stage("fp4repro.bench", stage.main)
    assert exit.value.code == 2 and said in capsys.readouterr().err
