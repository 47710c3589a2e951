"""The roofline model: counts by brute force, known points, monotone where it must be, and a fit that
never sees what it is judged by."""

import itertools
import sys
from dataclasses import replace

import pytest

from fp4repro.core.formats import FP8_TENSOR, MXFP8, NVFP4
from fp4repro.errors import Fp4ReproError
from fp4repro.models import ModelConfig
from fp4repro.recipes import KeepBF16, recipe
from fp4repro.roofline import calibrate, tables
from fp4repro.roofline.calibrate import FIT, HELD_OUT, cases, checks, fit, median_error, model_config
from fp4repro.roofline.devices import device, load_devices
from fp4repro.roofline.elementwise import attention_flops, model_flops, parameters, scan_flops
from fp4repro.roofline.factors import Factors
from fp4repro.roofline.gemm import Gemm, occupancy
from fp4repro.roofline.linears import block_linears, quantised_blocks
from fp4repro.roofline.passes import needs_amax, quantisation
from fp4repro.roofline.recipes import speed_recipe, speed_recipe_names
from fp4repro.roofline.speedup import linear_gains, speedups
from fp4repro.roofline.step import Setting, step

FACTORS = Factors(math_bf16=0.7, math_fp8=0.65, math_fp4=1.15, passes=0.6, step=0.8)
IDEAL = Factors(1, 1, 2, 1, 1, stream=1, attention=1, launch=0)
GB300 = device("GB300")


@pytest.fixture(scope="module")
def factors():
    return fit(cases())


# --- devices ---


@pytest.mark.parametrize(("name", "over_fp8", "over_bf16"), [("GB200", 2, 4), ("GB300", 3, 6)])
def test_peak_ratios_are_those_of_the_papers_table(name, over_fp8, over_bf16):
    assert device(name).peak_ratio("fp4", "fp8") == over_fp8
    assert device(name).peak_ratio("fp4", "bf16") == over_bf16


def test_every_device_says_where_its_figures_come_from():
    assert set(load_devices()) >= {"H100", "H200", "B200", "GB200", "B300", "GB300"}
    for found in load_devices().values():
        assert found.source and (found.agree or found.note), found.name


def test_hopper_has_no_fp4_units():
    with pytest.raises(Fp4ReproError, match=r"H200 has no FP4 units.*GB300"):
        Gemm("x", "fprop", 128, 128, 128, NVFP4).seconds(device("H200"), FACTORS)


# --- one product ---


def test_flops_and_bytes_of_a_product_by_counting():
    m, n, k = 3, 4, 32
    gemm = Gemm("x", "fprop", m, n, k, NVFP4)
    multiplications = sum(1 for _ in itertools.product(range(m), range(n), range(k)))
    assert gemm.flops == 2 * multiplications
    codes = (m * k + n * k) / 2
    scales = (m + n) * k / 16
    assert gemm.bytes == codes + scales + 2 * m * n


def test_arithmetic_or_traffic_whichever_is_larger():
    wide = Gemm("x", "fprop", 128 * 148, 256 * 8, 4096)  # whole waves of whole tiles
    assert wide.seconds(GB300, IDEAL) == pytest.approx(wide.flops / 2500e12)
    thin = replace(wide, k=16)
    assert thin.seconds(GB300, IDEAL) == pytest.approx(thin.bytes / 8e12)
    assert thin.seconds(GB300, IDEAL) > thin.flops / 2500e12


def test_tiles_and_waves_by_counting():
    assert occupancy(128, 256, 1) == 1
    assert occupancy(129, 256, 1) == pytest.approx(129 / 256)  # a second row of tiles, nearly idle
    # 149 tiles of 128 x 128 on 148 multiprocessors take two waves.
    assert occupancy(128 * 149, 128, 148) == pytest.approx(149 / 296)
    assert all(0 < occupancy(m, n, 132) <= 1 for m in (1, 100, 5000) for n in (1, 1000, 4097))


@pytest.mark.parametrize("side", ["m", "n", "k"])
def test_a_larger_product_never_takes_less(side):
    gemm = Gemm("x", "fprop", 1024, 2048, 512, MXFP8)
    times = [replace(gemm, **{side: s}).seconds(GB300, FACTORS) for s in (128, 512, 1024, 4096, 16384)]
    assert times == sorted(times) and times[0] < times[-1]


def test_fp4_is_capped_by_its_own_peak():
    assert Factors(1, 1, 99, 1).rate(device("GB200"), "fp4") == 10000e12
    assert Factors(1, 1, 1.5, 1).rate(GB300, "fp4") == 1.5 * 5000e12


# --- passes ---


def test_bytes_of_the_passes_over_a_gradient_by_counting():
    values = 64 * 128
    amax, cast = quantisation(recipe("nvfp4"), ("dy_dgrad", "dy_wgrad"), values, GB300)
    assert amax.bytes == 2 * values
    assert cast.bytes == 2 * values + 2 * (values / 2 + values / 16)
    assert amax.flops == 2 * 16 * values  # the transform, for the second orientation


def test_passes_follow_the_recipe():
    values = 1024
    assert quantisation(recipe("bf16"), ("x_fprop", "x_wgrad"), values, GB300) == []
    (cast,) = quantisation(speed_recipe("mxfp8"), ("x_fprop", "x_wgrad"), values, GB300)
    assert cast.bytes == 2 * values + 2 * (values + values / 32) and cast.flops == 0
    # Hopper's FP8 units want a transposed copy of a tensor-wise operand, Blackwell's do not.
    tensor_wise = speed_recipe("fp8-tensor")
    written = [
        quantisation(tensor_wise, ("x_fprop", "x_wgrad"), values, device(d))[1] for d in ("H200", "B200")
    ]
    assert written[0].bytes - written[1].bytes == values
    assert needs_amax(NVFP4) and needs_amax(FP8_TENSOR) and not needs_amax(MXFP8)


# --- the model's linears ---


def test_fused_linears_hold_the_models_weights():
    for name, body in (("llama3-8b", 6_979_321_856), ("nemotron-12b", None)):
        config = model_config(name)
        total = sum(
            linear.fan_in * linear.fan_out
            for letter in config.pattern
            for linear in block_linears(config, {"M": "mamba", "-": "ffn", "*": "attention"}[letter])
        )
        weights = sum(
            i * o
            for letter in config.pattern
            for i, o in config.linears({"M": "mamba", "-": "ffn", "*": "attention"}[letter]).values()
        )
        assert total == weights
        assert body is None or total == body


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800)],
)
def test_llamas_have_their_published_parameters(name, count):
    assert parameters(model_config(name)) == count


def test_the_layer_rule_is_that_of_training():
    rule = quantised_blocks(model_config("nemotron-12b"), recipe("nvfp4"))
    assert rule == (False,) * 2 + (True,) * 52 + (False,) * 8
    assert not any(quantised_blocks(model_config("tiny"), recipe("bf16")))


def test_model_flops_are_those_that_published_rows_imply():
    """Tokens/s and TFLOP/s stand side by side in Megatron-Bridge's tables: 1158.1 at 128 x 8192 tokens in
    11.65 s on 4 GPUs, and 2425 at 5376 tokens/s."""
    assert model_flops(model_config("llama3-8b"), 8192) == pytest.approx(
        1158.1e12 * 4 * 11.65 / (128 * 8192), 0.002
    )
    assert model_flops(model_config("llama3-70b"), 8192) == pytest.approx(2425e12 / 5376, 0.005)


def test_attention_and_scan_flops_by_counting():
    config = ModelConfig(pattern="*", width=16, vocabulary=16, query_heads=2, kv_heads=1, head_dim=16)
    length = 64
    pairs = 2 * 2 * 2 * 16 * length**2 / 2  # QK and PV of two heads, FLOP a multiply-add, causal half
    assert attention_flops(config, length) == pytest.approx(3.5 * pairs / length)
    tiny = model_config("tiny")
    q, n, inner = tiny.chunk, tiny.state, tiny.mamba_inner
    chunk = 2 * (q * q * n + q * q * inner + 2 * q * n * inner)
    assert scan_flops(tiny) == pytest.approx(3.5 * chunk / q)


# --- the step ---


def test_a_step_is_the_sum_of_its_parts_and_more_gpus_take_less():
    config, rule = model_config("llama3-8b"), speed_recipe("nvfp4")
    one = step(config, rule, GB300, FACTORS, Setting(batch=16))
    eight = step(config, rule, GB300, FACTORS, Setting(batch=16, gpus=8))
    assert one.seconds == pytest.approx(sum(one.seconds_of.values()))
    assert one.seconds / 8 < eight.seconds < one.seconds / 7
    assert one.tokens_per_second * one.seconds == pytest.approx(16 * 8192)
    piped = step(config, rule, GB300, FACTORS, Setting(batch=16, gpus=8, pp=4))
    assert piped.seconds_of["pipeline bubble"] > 0 == eight.seconds_of["pipeline bubble"]


def test_more_blocks_in_bf16_take_longer():
    config = model_config("nemotron-12b")
    times = [
        step(config, recipe("nvfp4").replace(keep=KeepBF16(last=n)), GB300, FACTORS, Setting()).seconds
        for n in (0, 8, 30, 62)
    ]
    assert times == sorted(times) and times[0] < times[-1]
    assert times[-1] == pytest.approx(step(config, recipe("bf16"), GB300, FACTORS, Setting()).seconds)


def test_four_speed_ups_shrink_from_the_bound_to_the_step():
    s = speedups(model_config("nemotron-12b"), recipe("nvfp4"), recipe("bf16"), GB300, FACTORS, Setting())
    assert s.peak > s.kernel > s.quantised > s.end_to_end > 1


def test_few_tokens_lose_and_the_break_even_is_between():
    def gains(tokens):
        setting = Setting(sequence=tokens)
        return linear_gains(model_config("tiny"), recipe("nvfp4"), recipe("bf16"), GB300, FACTORS, setting)

    assert all(g.gain < 1 and (g.break_even or 2**20) > 4096 for g in gains(128))  # launches decide
    large = linear_gains(
        model_config("nemotron-12b"), recipe("nvfp4"), recipe("bf16"), GB300, FACTORS, Setting(sequence=256)
    )
    assert all(g.gain < 1 and g.break_even in (512, 1024) for g in large)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gpus": 6, "tp": 4}, "6 GPUs cannot be split"),
        ({"batch": 3, "microbatch": 2}, "cannot be split into microbatches"),
        ({"vp": 0}, "vp must be 1 or more"),
    ],
)
def test_a_setting_that_does_not_fit_is_a_sentence(wrong, said):
    with pytest.raises(Fp4ReproError, match=said):
        Setting(**wrong)


def test_linears_that_do_not_split_are_a_sentence():
    with pytest.raises(Fp4ReproError, match="cannot be split over tp = 11"):
        block_linears(model_config("llama3-8b"), "ffn", tp=11)


# --- calibration ---


def test_held_out_rows_are_never_seen_by_the_fit(factors):
    spoiled = [
        replace(entry, value=3 * entry.value) if entry.case["role"] == HELD_OUT else entry
        for entry in cases()
    ]
    assert fit(spoiled) == factors
    touched = [
        replace(entry, value=1.1 * entry.value) if entry.case["role"] == FIT else entry for entry in cases()
    ]
    assert fit(touched) != factors


def test_the_fit_finds_factors_that_made_its_rows():
    true = replace(FACTORS, step=0.7)
    made = [replace(entry, value=calibrate.predict(entry, true)) for entry in cases()]
    found = fit(made)
    for name in ("math_bf16", "math_fp8", "math_fp4", "passes", "step"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.01), name
    assert median_error(checks(made, found)) < 0.002


def test_too_few_rows_to_fit_are_a_sentence():
    with pytest.raises(Fp4ReproError, match="too few"):
        fit([entry for entry in cases() if entry.case["role"] == HELD_OUT])


def test_the_table_marks_every_row_and_reports_the_held_out_error(factors):
    found = checks(cases(), factors)
    rows = list(tables.rows(found, factors))
    assert all(row.provenance in ("published", "modelled") for row in rows if row.value is not None)
    of = {(row.setting, row.metric): row for row in rows}
    held = [check for check in found if check.role == HELD_OUT]
    assert of["errors/held-out", "median_absolute_error"].value == pytest.approx(100 * median_error(held))
    assert of["errors/held-out", "median_absolute_error"].n == len(held) == 61
    peak = [row for row in rows if row.metric == "peak_ratio_to_mxfp8"]
    assert [(row.device, row.value) for row in peak] == [("GB200", 2), ("GB300", 3)]
    assert all("bound" in row.note for row in peak)
    not_run = [row for row in rows if row.value is None]
    assert not_run and all(row.note.startswith("not run: ") for row in not_run)
    published = of["headline/mb-llama3-70b-gb300-nvfp4", "end_to_end_to_mxfp8"]
    assert published.value == pytest.approx(3284 / 2156) and published.provenance == "published"


def test_predictions_for_a_gpu_without_fp4_units_say_so(factors):
    rows = list(tables.predictions("tiny", model_config("tiny"), device("H200"), factors, 1024))
    lacking = [row for row in rows if row.value is None]
    assert {row.setting.rsplit("/", 1)[1] for row in lacking} == {"mxfp8", "nvfp4"}
    assert all("H200 has no units" in row.note for row in lacking)
    assert all(row.provenance == "modelled" for row in rows)


# --- the command ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "GB301"], "no device is named 'GB301' (did you mean GB300?)"),
        (["--model", "llama"], "there is no model 'llama' in configs/models"),
        (["--recipe", "nvfp5"], "no recipe is named 'nvfp5' (did you mean 'nvfp4'?)"),
        (["--device", "H200"], "H200 has no FP4 units"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, said, monkeypatch, capsys):
    from fp4repro.errors import run_stage
    from fp4repro.roofline import __main__ as stage

    monkeypatch.setattr(sys, "argv", ["roofline", *arguments])
    monkeypatch.setattr(stage, "fitted", lambda: FACTORS)
    with pytest.raises(SystemExit) as exit:
        run_stage("fp4repro.roofline", stage.main)
    assert exit.value.code == 2
    assert said in capsys.readouterr().err


def test_the_command_prints_the_four_speed_ups_apart(monkeypatch, capsys):
    from fp4repro.roofline import __main__ as stage

    monkeypatch.setattr(sys, "argv", ["roofline"])
    monkeypatch.setattr(stage, "fitted", lambda: FACTORS)
    stage.main()
    shown = capsys.readouterr().out
    assert "modelled, not measured" in shown
    for words in ("peak ratio (a bound)", "kernel only", "with quantisation", "end to end"):
        assert words in shown


def test_recipes_are_those_of_linears_and_two_baselines():
    of_linears = {"bf16", "fp8", "nvfp4", "mxfp4", "four-over-six", "fp4-all-the-way", "nemotron3-super"}
    assert set(speed_recipe_names()) == of_linears | {"mxfp8", "fp8-tensor"}
    assert speed_recipe("nvfp4") is recipe("nvfp4")
