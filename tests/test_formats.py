"""The options of a block format against the oracle, to the bit, and scale equivariance under each."""

import cases
import numpy as np
import oracle
import pytest
import torch
from test_quantize import assert_equals_oracle

from fp4repro import FP8, MXFP4, MXFP8, NVFP4, RandomKey, quantize
from fp4repro.core.formats import UE5M3

pytestmark = [pytest.mark.usefixtures("eager"), pytest.mark.filterwarnings("error")]

EQUIVARIANT = {
    "1x16": NVFP4,
    "16x1": NVFP4.with_block(16, 1),
    "16x16": NVFP4.with_block(16, 16),
    "te-2.13": NVFP4.replace(order="te-2.13"),
    "paper": NVFP4.replace(order="paper"),
    "up": NVFP4.replace(scale_rounding="up"),
    "head-room": NVFP4.replace(target=6 * 16 / 17),
    "4/6 mse": NVFP4.replace(four_over_six="mse", scale_target=256.0),
    "4/6 mae": NVFP4.replace(four_over_six="mae", scale_target=256.0),
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "fp8": FP8,
}


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_powers_of_two_change_nothing_but_the_tensor_scale(name):
    fmt = EQUIVARIANT[name]
    x = torch.from_numpy(np.concatenate([cases.normal(1), cases.NAMED["scaleties"][:32]], 1))
    base, key = quantize(x, fmt), RandomKey(2)
    random = quantize(x, fmt, "stochastic", key).codes
    for k in range(-60, 61):
        scaled = torch.ldexp(x, torch.tensor(k))
        q = quantize(scaled, fmt)
        assert torch.equal(q.codes, base.codes), k
        shift = 0 if fmt.tensor_scale else k
        assert torch.equal(q.scales.float(), torch.ldexp(base.scales.float(), torch.tensor(shift))), k
        assert torch.equal(q.dequantize(), torch.ldexp(base.dequantize(), torch.tensor(k))), k
        assert torch.equal(quantize(scaled, fmt, "stochastic", key).codes, random), k


@pytest.mark.parametrize("order", ["te", "te-2.13", "paper"])
@pytest.mark.parametrize("name", ["scaleties", "scaleties_scaled", "ties", "outlier", "subnormal"])
def test_orders_of_operations(order, name):
    x = cases.NAMED[name]
    q = quantize(torch.from_numpy(x), NVFP4.replace(order=order))
    assert_equals_oracle(q, oracle.nvfp4(x, order=order))


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("name", ["gauss", "scaleties", "scaleunderflow", "ties", "huge"])
def test_scales_rounded_one_way(direction, name):
    x = cases.NAMED[name]
    q = quantize(torch.from_numpy(x), NVFP4.replace(scale_rounding=direction))
    expected = oracle.nvfp4(x, scale_rounding=direction)
    assert_equals_oracle(q, expected)
    if direction == "up":
        assert np.abs(expected.scaled).max() < 6 * (1 + 1e-6)  # nothing is clipped


def test_head_room_prevents_clipping():
    """16/17 of 6 outweighs the largest rounding down of an E4M3 scale, 1/17."""
    x = cases.normal(3, (4096, 64))
    q = quantize(torch.from_numpy(x), NVFP4.replace(target=6 * 16 / 17))
    expected = oracle.nvfp4(x, target=6 * 16 / 17)
    assert_equals_oracle(q, expected)
    assert np.abs(expected.scaled).max() <= 6 < np.abs(oracle.nvfp4(x).scaled).max()


@pytest.mark.parametrize("name", ["gauss", "outlier", "scaleties"])
def test_one_level_scales(name):
    x = cases.NAMED[name]
    q = quantize(torch.from_numpy(x), NVFP4.replace(tensor_scale=False))
    assert_equals_oracle(q, oracle.nvfp4(x, tensor_scale=False))
    assert q.tensor_scale.item() == 1


@pytest.mark.parametrize("measure", ["mse", "mae"])
@pytest.mark.parametrize("exponent", [0, -70, 70])
def test_four_over_six(measure, exponent):
    """Equal to the oracle but where both errors agree to FP32 rounding, at any magnitude."""
    x = np.ldexp(cases.normal(4, (256, 64)), exponent)
    fmt = NVFP4.replace(four_over_six=measure, scale_target=256.0)
    q, expected = quantize(torch.from_numpy(x), fmt), oracle.four_over_six(x, measure)
    differ = q.scales.view(torch.uint8).numpy() != expected.scales
    assert differ.mean() < 1e-3
    same = oracle.spread(~differ, (1, 16))
    assert np.array_equal(q.dequantize().numpy()[same], expected.values[same])
    top = oracle.block_amax(np.abs(expected.values / expected.stored / expected.decode), (1, 16))
    assert 0.2 < np.mean(top == 4) < 0.8 and 0.2 < np.mean(top == 6) < 0.8


def test_unsigned_scales_of_five_exponent_bits():
    """They hold what E4M3 flushes to zero; nearest by division through the grid's spacing, float64."""
    x = cases.NAMED["scaleunderflow"].copy()
    x[1::2] *= 20
    q = quantize(torch.from_numpy(x), NVFP4.replace(scale=UE5M3, scale_target=448.0))
    assert q.scales.dtype == torch.uint8
    encode, decode = oracle.tensor_scales(np.abs(x).max())
    wanted = oracle.wanted_scale(oracle.block_amax(x, (1, 16)), encode, "te", 6.0).astype(np.float64)
    step = np.exp2(np.maximum(np.frexp(wanted)[1] - 1, -14) - 3.0)
    s = (np.round(wanted / step) * step).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        e = np.minimum(np.float32(1) / (s * decode), oracle.FLT_MAX)
    scaled = x * oracle.spread(e, (1, 16))
    v = oracle.nearest(scaled, oracle.E2M1) * oracle.spread(s, (1, 16)) * decode
    assert np.array_equal(q.dequantize().numpy(), v)
    assert (wanted < 2.0**-14).any() and (v[1] != 0).any()
    assert not quantize(torch.from_numpy(x), NVFP4).dequantize()[1].any()
