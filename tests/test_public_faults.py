"""Faults reported in public around NVFP4, each as a test named after its entry: scales and transform.

Sections A (scale arithmetic) and C (Hadamard) here; D (layout), G (parallel amax), I2 (nibbles) and F6
in test_public_faults_layout.py; B and E2 to F5, which need layers, in test_public_faults_training.py.
What has no test in these three files:

    A6 more in     test_known_answers.py (bands at every scale)
    B6 processes   training runs in one process; its resumed run is in test_checkpoint.py
    D3 grouped     the library has no grouped product; experts are separate layers, tested as such (A3)
    D7 fused       test_export.py: q, k, v of different maxima reloaded under one tensor scale
    E1 backends    test_backends.py: a backend that raises, returns zeros or NaN is called unusable
    F1 shards      parameters are never stored packed: checkpoints hold the FP32 masters
    F4 both losses nothing evaluates a model in both precisions yet
    G1 processes   shards are emulated as a list here; no process group is used by the library
    H1 to H3       claims about speed and memory belong to the benchmark's tests
    GPU            C3's concurrent work, D1's uninitialised device memory, B7's captured graphs
"""

import cases
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch

from fp4repro import FP8, MXFP4, MXFP8, NVFP4, fake_quantize, hadamard, matmul, quantize
from fp4repro.core.quantize import NonFiniteError
from fp4repro.core.tensor import load_scales

pytestmark = pytest.mark.usefixtures("eager")
TILE, COLUMNS = NVFP4.with_block(16, 16), NVFP4.with_block(16, 1)
ALL = {"1x16": NVFP4, "16x1": COLUMNS, "16x16": TILE, "mxfp4": MXFP4, "mxfp8": MXFP8, "fp8": FP8}
every_format = pytest.mark.parametrize("fmt", ALL.values(), ids=ALL)


def normal(*shape, seed=0, scale=1.0):
    return torch.from_numpy(cases.normal(seed, shape, scale))


def relative_error(got, want):
    got, want = got.double(), want.double()
    assert want.norm() > 0
    return ((got - want).norm() / want.norm()).item()


def scale_bytes(q):
    return q.scales.view(torch.uint8)


@every_format
def test_A1_no_nan_bytes_in_scales(fmt):
    one_zero_block = normal(32, 32, scale=1e-4)
    one_zero_block[:16] = 0
    one_block_at_amax = torch.zeros(32, 32)
    one_block_at_amax[3, 5] = 1e4
    for x in (one_zero_block, one_block_at_amax, one_block_at_amax * 1e-30, torch.zeros(32, 32)):
        q = quantize(x, fmt)
        nan = 0xFF if fmt.scale.name == "ue8m0" else 0x7F
        assert ((scale_bytes(q) & nan) != nan).all()
        assert load_scales(q.scales, fmt).isfinite().all()
        assert (q.dequantize()[x == 0] == 0).all() and q.dequantize().isfinite().all()
    if fmt.tensor_scale:
        zero = quantize(one_zero_block, fmt)
        assert (load_scales(zero.scales, fmt)[0] == 0).all(), "no special value for zero blocks"


def test_A2_scales_above_448_saturate_whatever_the_cast_does():
    wanted = np.array([448, 464, 465, 480, 1e9], np.float32)
    with np.errstate(invalid="ignore"):
        raw = wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.isnan(raw[2:]).all(), "the cast of ml_dtypes does not saturate: what must not be relied on"
    x = torch.zeros(5, 16)
    x[:, 0] = torch.from_numpy(wanted) * 6
    q = quantize(x, NVFP4, amax=torch.tensor(2688.0))  # tensor scale 1
    assert scale_bytes(q).flatten().tolist() == [0x7E] * 5
    assert q.dequantize()[:, 0].tolist() == [2688.0] * 5
    assert torch.equal(fake_quantize(x, NVFP4, amax=torch.tensor(2688.0)), q.dequantize())


@every_format
def test_A3_zero_tensor(fmt):
    q = quantize(torch.zeros(32, 32), fmt)
    assert not q.codes.any() and not q.dequantize().any()
    assert q.tensor_scale.isfinite() and load_scales(q.scales, fmt).isfinite().all()
    other = quantize(normal(16, 32), NVFP4)
    if fmt.block[1] > 1:
        assert not matmul(q, other).any()


def test_A4_small_blocks_are_lost_only_below_the_scale_s_range():
    """A block 4e5 times below the maximum still has a subnormal scale; nothing is clamped from below."""
    x = normal(64, 16)
    x[1:] *= torch.logspace(0, -7, 63)[:, None]
    x[0, 0] = 6
    q = quantize(x, NVFP4)
    ratio = 6 / x.abs().amax(1)
    scales = q.scales.float().flatten()
    assert (scales[ratio < 4.5e5] > 0).all() and (scales[ratio > 4.6e5] == 0).all()
    assert (scales == 0).any() and ((scales > 0) & (scales < 2.0**-6)).any()
    assert (q.dequantize()[scales == 0] == 0).all()
    for magnitude in (1e-30, 1e-10, 1e-6, 42.0):  # every tensor that a floor of 2**-6 would touch
        x = normal(64, 64, scale=magnitude)
        assert relative_error(fake_quantize(x, NVFP4), x) < 0.105


@pytest.mark.parametrize("fmt", [NVFP4, COLUMNS, TILE], ids=["1x16", "16x1", "16x16"])
def test_A5_very_small_and_very_large_amax(fmt):
    """Transformer Engine's own decoding gives zeros below 7.9e-36 and infinities above 7.6e35; ours
    holds wherever the block's step has a finite reciprocal, that is for amax in FP32's normal range.
    Blocks of subnormals get Transformer Engine's codes, which are zeros: lost, but finite."""
    for magnitude in (1e-38, 1e-37, 1e-36, 1e-35, 1e34, 1e36, 5e37):
        x = normal(64, 64).double().mul(magnitude).float()
        assert 0.08 < relative_error(fake_quantize(x, fmt), x) < 0.2, magnitude
    for name in ("huge", "fltmax", "mixedsubnormal"):
        x = torch.from_numpy(cases.NAMED[name])
        assert fake_quantize(x, fmt).isfinite().all()
        assert relative_error(fake_quantize(x, fmt), x) < 0.3, name  # a tile with the one outlier
    lost = quantize(torch.from_numpy(cases.NAMED["subnormal"]), fmt)
    assert lost.tensor_scale > 0 and lost.dequantize().isfinite().all()
    assert lost.dequantize().abs().max() <= 2 * lost.amax


def test_A6_the_tensor_scale_is_applied_and_once():
    x = normal(256, 256)
    for magnitude in (1e-4, 1.0, 1e4):
        q = quantize(x * magnitude, NVFP4)
        assert 0.085 < relative_error(q.dequantize(), x * magnitude) < 0.105
        assert 0.06 < (q.dequantize() == 0).float().mean() < 0.08
        assert scale_bytes(q).max() == 0x7E  # the largest block's scale is the type's maximum
        assert q.tensor_scale.item() == pytest.approx((x * magnitude).abs().max().item() / 2688, rel=1e-6)
    flat = fake_quantize(x * 1e-4, NVFP4.replace(tensor_scale=False))
    assert relative_error(flat, x * 1e-4) == 1.0


def test_A7_elements_are_divided_by_the_scale_that_is_stored():
    x = cases.NAMED["gauss"]
    q = quantize(torch.from_numpy(x), NVFP4)
    s = scale_bytes(q).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    _, decode = oracle.tensor_scales(q.amax.item())
    e = oracle.spread(np.float32(1) / (s * decode), (1, 16))
    magnitude = oracle.nearest(np.abs(x * e), oracle.E2M1)
    codes = oracle.codes_of(oracle.with_sign(magnitude, x), oracle.E2M1)
    assert np.array_equal(q.codes.numpy(), codes[:, 0::2] | codes[:, 1::2] << 4)
    exact = 6 / oracle.spread(oracle.block_amax(x, (1, 16)), (1, 16))
    assert (oracle.nearest(np.abs(x * exact), oracle.E2M1) != magnitude).mean() > 0.02


def test_A8_scales_are_rounded_once_and_to_nearest():
    x = cases.NAMED["scaleties_scaled"]
    b = oracle.block_amax(x, (1, 16))
    encode, _ = oracle.tensor_scales(np.abs(x).max())
    wanted = oracle.wanted_scale(b, encode, "te", 6.0)
    expected = wanted.clip(max=448).astype(ml_dtypes.float8_e4m3fn)
    got = scale_bytes(quantize(torch.from_numpy(x), NVFP4)).numpy()
    assert np.array_equal(got, expected.view(np.uint8))
    for other in (
        wanted.astype(np.float16).clip(max=448).astype(ml_dtypes.float8_e4m3fn),  # twice
        oracle.to_neighbour(wanted.clip(max=448), oracle.E4M3, "down").astype(ml_dtypes.float8_e4m3fn),
        oracle.to_neighbour(wanted.clip(max=448), oracle.E4M3, "up").astype(ml_dtypes.float8_e4m3fn),
    ):
        assert (other.view(np.uint8) != got).sum() > 20


def test_A9_ties_to_even_from_float32():
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x = torch.cat([midpoints, -midpoints]) * 448
    assert fake_quantize(x[None], NVFP4)[0].div(448).tolist() == [
        *(0, 1, 1, 2, 2, 4, 4, 6),
        *(0, -1, -1, -2, -2, -4, -4, -6),
    ]
    above = torch.nextafter(midpoints[:7], torch.tensor(9.0))
    x = torch.zeros(1, 16)
    x[0, :7], x[0, 7] = above * 256, 6 * 256  # a power of two as scale, so nothing is rounded on the way
    got = quantize(x, NVFP4, amax=torch.tensor(2688.0)).dequantize()[0, :7] / 256
    assert got.tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]  # 2.5000002 is not 2.5


@every_format
def test_A10_the_magnitude_counts_and_not_the_maximum(fmt):
    x = normal(32, 32).clamp(-0.9, 0.9)
    x[7, 9] = -100
    plus, minus = quantize(x, fmt), quantize(-x, fmt)
    assert plus.amax == minus.amax == 100
    assert torch.equal(scale_bytes(plus), scale_bytes(minus))
    assert torch.equal(plus.dequantize(), -minus.dequantize())
    assert plus.dequantize()[7, 9] == -fake_quantize(-x, fmt)[7, 9] < -90


@every_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_A11_nan_and_infinity_are_not_hidden(fmt, bad):
    x = normal(32, 32)
    x[17, 3] = bad
    with pytest.raises(NonFiniteError, match="look upstream"):
        quantize(x, fmt)
    assert fake_quantize(x, fmt, nonfinite="poison").isnan().all()


def test_C1_both_operands_share_their_signs():
    dy, x = normal(96, 256).double(), normal(80, 256, seed=1).double()
    exact = dy @ x.T
    assert relative_error(hadamard(dy) @ hadamard(x).T, exact) < 1e-6
    assert 1.2 < relative_error(hadamard(dy) @ hadamard(x, signs="none").T, exact) < 1.9
    # Shards of whole groups of 16 tokens add up to the same product.
    shards = [hadamard(dy[:, i : i + 64]) @ hadamard(x[:, i : i + 64]).T for i in range(0, 256, 64)]
    assert relative_error(sum(shards), exact) < 1e-6


def test_C2_amax_is_taken_after_the_transform():
    x = hadamard(torch.eye(16)[:1], signs="te") * 4  # a run equal to the signs of one row
    signs = torch.where(hadamard(torch.eye(16))[:, 0] > 0, 1.0, -1.0)[None].repeat(16, 1)
    assert x.abs().max() == 1 and signs.abs().max() == 1
    turned = hadamard(signs.bfloat16())
    assert turned.abs().max() == 4
    q = quantize(turned, NVFP4)
    assert q.amax == 4 and relative_error(q.dequantize(), turned) < 1e-6
    saturated = quantize(turned, NVFP4, amax=torch.tensor(1.0))
    assert relative_error(saturated.dequantize(), turned) > 0.7


@every_format
def test_C3_the_same_input_gives_the_same_bytes(fmt):
    x = normal(256, 64)
    first = quantize(x, fmt)
    for _ in range(100):
        again = quantize(x, fmt)
        assert torch.equal(first.codes, again.codes) and first.amax == again.amax
        assert torch.equal(scale_bytes(first), scale_bytes(again))


def test_C4_the_transform_is_rounded_to_bf16_before_quantising():
    x = cases.bf16(cases.NAMED["outlier"])
    y = hadamard(torch.from_numpy(x).bfloat16())
    assert np.array_equal(y.float().numpy(), oracle.hadamard_bf16(x))
    unrounded = hadamard(torch.from_numpy(x))
    rounded, kept = quantize(y, NVFP4), quantize(unrounded, NVFP4)
    assert not torch.equal(rounded.codes, kept.codes)  # the rounding is seen in the codes
