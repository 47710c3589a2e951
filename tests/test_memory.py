"""The account of memory against real packed tensors, hooks and live storages, and its extension points."""

import sys

import pytest
import torch

from fp4repro.core.formats import FP8, FP8_FP32_SCALES, FP8_TENSOR, MXFP8, NVFP4
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.memory import __main__ as stage
from fp4repro.memory.account import ACTIVATIONS, STATES, WEIGHTS, Assumptions, account
from fp4repro.memory.activations import FUSED, saved_per_token
from fp4repro.memory.measure import LiveBytes, measure
from fp4repro.memory.operands import measured_bytes, operand_bytes
from fp4repro.models import HybridModel
from fp4repro.recipes import recipe
from fp4repro.roofline.calibrate import model_config
from fp4repro.roofline.elementwise import parameters
from fp4repro.roofline.recipes import speed_recipe

GIB = 2**30


@pytest.mark.parametrize(
    "fmt",
    [NVFP4, NVFP4.with_block(16, 16), MXFP8, FP8, FP8.with_block(128, 128), FP8_FP32_SCALES, FP8_TENSOR],
    ids=lambda fmt: f"{fmt.name}-{fmt.block}",
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (48, 320), (1, 32)])
def test_real_packed_tensors_have_the_bytes_of_the_formula(fmt, padded, shape):
    if shape[0] % 16 and fmt.block == (16, 16):
        pytest.skip("whole tiles only")
    assert measured_bytes(fmt, *shape, padded) == operand_bytes(fmt, *shape, padded)


def test_half_of_fp8_holds_for_one_orientation_and_not_for_two_against_one():
    side = 512
    one = measured_bytes(NVFP4, side, side)
    assert one / side**2 == pytest.approx(0.5625, rel=1e-4)
    assert one / measured_bytes(MXFP8, side, side) == pytest.approx(0.5625 / (1 + 1 / 32), rel=1e-4)
    # Tensor-wise FP8 on Blackwell serves both products with one copy.
    assert 2 * one > measured_bytes(FP8_TENSOR, side, side)


def test_few_rows_are_mostly_padding():
    assert measured_bytes(NVFP4, 16, 4096, padded=True) > 1.3 * measured_bytes(NVFP4, 16, 4096)


def test_states_and_weights_by_counting():
    config = model_config("tiny")
    found = account(config, recipe("bf16"), Assumptions(tokens=128))
    count = sum(p.numel() for p in HybridModel(config, device="meta").parameters())
    assert parameters(config) == count
    assert found.group(STATES) == 16 * count
    linears = sum(
        m.weight.numel() for m in HybridModel(config, device="meta").modules() if type(m) is torch.nn.Linear
    )
    assert found.group(WEIGHTS) == 2 * linears  # the head among them


def test_ranks_share_states_and_not_activations():
    config, rule = model_config("nemotron-12b"), recipe("nvfp4")
    one, eight = (account(config, rule, Assumptions(ranks=n, implementation=FUSED)) for n in (1, 8))
    assert eight.group(STATES) == pytest.approx(one.group(STATES) / 8)
    assert eight.group(ACTIVATIONS) == one.group(ACTIVATIONS)
    assert one.group(WEIGHTS) / 8 < eight.group(WEIGHTS) < one.group(WEIGHTS)


def test_the_12b_takes_less_in_fewer_bits():
    totals = [
        account(model_config("nemotron-12b"), speed_recipe(name), Assumptions(implementation=FUSED)).total
        for name in ("nvfp4", "fp8", "bf16")
    ]
    assert totals == sorted(totals) and totals[0] < totals[1] < totals[2]
    assert 200 < totals[2] / GIB < 300


def test_other_modules_come_in_as_bits():
    """Moments of 10 bits and packed Q, K and V: the difference is what they pack, to the byte."""
    config, rule = model_config("nemotron-12b"), recipe("nvfp4")
    plain = account(config, rule, Assumptions(tokens=64, implementation=FUSED))
    packed = Assumptions(
        tokens=64, implementation=FUSED, moment_bits=(10, 10), activation_bits={"q, k, v": 4.5}
    )
    found = account(config, rule, packed)
    assert plain.group(STATES) - found.group(STATES) == pytest.approx(parameters(config) * 2 * (32 - 10) / 8)
    values = 6 * 64 * (40 + 2 * 8) * 128
    assert plain.group(ACTIVATIONS) - found.group(ACTIVATIONS) == pytest.approx(values * (16 - 4.5) / 8)


def test_swiglu_keeps_more_than_squared_relu():
    llama = model_config("llama3-8b")
    kept = saved_per_token(llama, "ffn", None)
    assert sum(kept.values()) > sum(saved_per_token(llama.replace(activation="relu2"), "ffn", None).values())


@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
@pytest.mark.parametrize("model", ["tiny", "swiglu"])
def test_a_step_measured_agrees_with_the_account(model, name):
    """Peak within 1 %; what hooks see within 2 % of the items that autograd keeps."""
    config, rule = model_config("tiny"), recipe(name)
    if model == "swiglu":
        config = config.replace(pattern="*-*-", activation="swiglu", positions="rope")
    batch, context = 4, 128
    seen = measure(config, rule, batch, context)
    found = account(config, rule, Assumptions(tokens=batch * context))
    assert found.total == pytest.approx(seen.peak, rel=0.01)
    not_saved = ("outside: logits", "outside: loss in float32")
    items = sum(
        n for (group, item), n in found.bytes_of.items() if group == ACTIVATIONS and item not in not_saved
    )
    copies = sum(
        n for (group, item), n in found.bytes_of.items() if group == WEIGHTS and item != "packed weights"
    )
    assert items + copies == pytest.approx(seen.saved, rel=0.02)


def test_live_bytes_follow_what_lives():
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a + 1
        assert live.now == 8000
        view = b[:10]
        del b
        assert live.now == 8000  # the view keeps it
        del view
        a += 1
        assert live.now == 4000 and live.peak == 8000
    del a
    assert live.now == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0"], "must be 1 or more"),
        (["--recipe", "fp5"], "no recipe is named 'fp5'"),
        (["--model", "none"], "there is no model 'none'"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory", *arguments])
    with pytest.raises(SystemExit) as exit:
        run_stage("fp4repro.memory", stage.main)
    assert exit.value.code == 2 and said in capsys.readouterr().err


def test_assumptions_that_make_no_sense_are_refused():
    for wrong in ({"ranks": 0}, {"orientations": 3}, {"implementation": "theirs"}):
        with pytest.raises(Fp4ReproError):
            Assumptions(**wrong)
