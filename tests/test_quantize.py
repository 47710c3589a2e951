"""The quantiser against the oracle, to the bit: every format, block and family of inputs."""

import cases
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch

from fp4repro import FP8, MXFP4, MXFP8, NVFP4, RandomKey, fake_quantize, quantize
from fp4repro.core.formats import FP8_FP32_SCALES, FP8_TENSOR
from fp4repro.core.kernels import tensor_scales
from fp4repro.core.quantize import quantize_operand
from fp4repro.core.random import random_bits

pytestmark = [pytest.mark.usefixtures("eager"), pytest.mark.filterwarnings("error")]
BLOCKS = [(1, 16), (16, 1), (16, 16)]
POWERS = {  # formats of power-of-two scales: block and element type for the oracle
    "mxfp4": (MXFP4, (1, 32), oracle.E2M1),
    "mxfp4_tiles": (MXFP4.with_block(32, 32), (32, 32), oracle.E2M1),
    "mxfp8": (MXFP8, (1, 32), oracle.E4M3),
    "fp8": (FP8, (1, 128), oracle.E4M3),
    "fp8_tiles": (FP8.with_block(128, 128), (128, 128), oracle.E4M3),
    "fp8_columns": (FP8.with_block(128, 1), (128, 1), oracle.E4M3),
}


def assert_equals_oracle(q, expected):
    assert q.amax.item() == expected.amax
    wrong = q.scales.view(torch.uint8).numpy() != expected.scales
    assert not wrong.any(), f"{wrong.sum()} scales differ"
    wrong = q.codes.numpy() != (expected.packed if q.format.element.bits == 4 else expected.codes)
    assert not wrong.any(), f"{wrong.sum()} bytes of codes differ"
    got = q.dequantize().numpy()
    assert np.array_equal(got.view(np.uint32), expected.values.view(np.uint32)), "values"


def family_equals_oracle(name, blocks, seed=0):
    x = cases.family(name, blocks, seed)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        assert_equals_oracle(quantize(torch.from_numpy(x), NVFP4), oracle.nvfp4(x))


@pytest.mark.parametrize("name", cases.FAMILIES)
def test_a_million_random_blocks(name):
    """In all over the families."""
    family_equals_oracle(name, 1_000_000 // len(cases.FAMILIES))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("name", cases.FAMILIES)
def test_ten_million_random_blocks(name, seed):
    family_equals_oracle(name, 1_000_000 // len(cases.FAMILIES), seed)


def test_the_tensor_scales_of_many_amaxes():
    """One division each, as the formula has it; zero, the tiniest and the largest included."""
    rng = np.random.default_rng(5)
    amax = np.exp2(rng.uniform(-149, 128, 20000)).astype(np.float32)
    amax = np.concatenate([amax, [0, 1e-45, 2.0**-126, 7.9e-36, 2688, oracle.FLT_MAX]]).astype(np.float32)
    encode, decode = tensor_scales(torch.from_numpy(amax), NVFP4)
    expected = [oracle.tensor_scales(a) for a in amax]
    assert encode.tolist() == [float(e) for e, _ in expected]
    assert decode.tolist() == [float(d) for _, d in expected]


@pytest.mark.parametrize("block", BLOCKS[1:], ids=str)
@pytest.mark.parametrize("name", cases.FAMILIES)
def test_columns_and_tiles(name, block):
    x = cases.family(name, 64 * 256)
    assert_equals_oracle(quantize(torch.from_numpy(x), NVFP4.with_block(*block)), oracle.nvfp4(x, block))


@pytest.mark.parametrize("kind", POWERS)
@pytest.mark.parametrize("name", cases.FAMILIES)
def test_formats_of_power_of_two_scales(name, kind):
    fmt, block, element = POWERS[kind]
    x = cases.family(name, 4096).reshape(-1, 256)  # (256, 256)
    assert_equals_oracle(quantize(torch.from_numpy(x), fmt), oracle.power_of_two_scaled(x, block, element))


@pytest.mark.parametrize("kind", [k for k in POWERS if k.startswith("fp8")])
@pytest.mark.parametrize("shape", [(1, 2), (3, 130), (129, 128), (200, 300)], ids=str)
def test_fp8_fills_its_last_blocks_with_zeros(kind, shape):
    fmt, block, element = POWERS[kind]
    x = cases.normal(1, shape)
    q = quantize(torch.from_numpy(x), fmt)
    assert q.codes.shape == shape
    assert_equals_oracle(q, oracle.power_of_two_scaled(x, block, element))


@pytest.mark.parametrize("fmt, span", [(FP8_FP32_SCALES, (1, 128)), (FP8_TENSOR, (64, 256))], ids=str)
def test_fp8_with_fp32_scales(fmt, span):
    x = cases.normal(2, (64, 256), scale=3e-5)
    x[0, :128] = 0
    q = quantize(torch.from_numpy(x), fmt)
    amax = oracle.spread(oracle.block_amax(x, span), span).astype(np.float64)
    scales = q.scales.numpy() if q.scales.dim() else np.full((64, 1), q.scales.item())
    stored = oracle.spread(scales, (1, span[1])).astype(np.float64)
    inside = amax > 0
    assert np.allclose(stored[inside], (amax / 448)[inside], rtol=3e-7, atol=0)
    scaled = np.where(inside, x / stored, 0).clip(-448, 448).astype(np.float32)
    expected = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * stored
    off = np.abs(q.dequantize().numpy() - expected)
    assert np.mean(off > 1e-6 * amax) < 1e-3  # ties of the last bit may fall either way
    assert not q.dequantize()[0, :128].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_input_types(dtype):
    """Read as FP32 (exact, float64 rounded), given back in the input's type after one rounding."""
    x = torch.from_numpy(cases.family("wide_blocks", 1024) / 16).to(dtype)
    expected = oracle.nvfp4(x.float().numpy())
    q = quantize(x, NVFP4)
    assert_equals_oracle(q, expected)
    fake = fake_quantize(x, NVFP4)
    assert fake.dtype == dtype
    assert torch.equal(fake, torch.from_numpy(expected.values).to(dtype))
    assert torch.equal(fake, q.dequantize(dtype))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", ["wide_blocks", "tied", "tiny", "negative_maximum"])
def test_stochastic_equals_the_software_form(name, block):
    x, key = cases.family(name, 4096), RandomKey(3, 1, 4, 1)
    byte = random_bits(x.size, key, 8).numpy().reshape(x.shape)
    q = quantize(torch.from_numpy(x), NVFP4.with_block(*block), "stochastic", key)
    expected = oracle.nvfp4(x, block, random=byte)
    assert_equals_oracle(q, expected)
    assert (expected.codes != oracle.nvfp4(x, block).codes).mean() > 0.02


@pytest.mark.parametrize("bits", [16, 32])
def test_more_random_bits_halve_the_bias(bits):
    """The expectation is cut towards zero by at most step / 2**bits, which 8 bits show at 1/1024."""
    x = torch.full((1024, 64), 1 / 1024)
    x[:, ::16] = 6
    x[0, 0] = 2688
    x[0, 1:16] = 1
    inside = x == 1 / 1024
    for width, share in ((8, 0.0), (bits, 1 / 512)):
        q = quantize(x, NVFP4, "stochastic", RandomKey(1), random_bits=width)
        up = (q.dequantize()[inside] > 0).float().mean().item()
        sigma = (share * (1 - share) / inside.sum().item()) ** 0.5
        assert abs(up - share) <= 4 * sigma


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_three_outputs_agree(block, rounding):
    fmt, key = NVFP4.with_block(*block), RandomKey(5)
    for name in ("gauss", "ties", "zeroblock", "scaleunderflow", "mixedsubnormal", "huge"):
        x = torch.from_numpy(cases.NAMED[name])
        q = quantize(x, fmt, rounding, key)
        fake = fake_quantize(x, fmt, rounding, key)
        assert torch.equal(fake.view(torch.int32), q.dequantize().view(torch.int32)), name
        operand, decode = quantize_operand(x, fmt, rounding, key)
        assert operand.dtype == torch.bfloat16
        assert torch.equal(operand, q.operand()), name
        assert torch.equal(operand.float() * decode, fake), name
        assert decode == q.tensor_scale


def test_a_given_amax_replaces_the_own_one():
    x, amax = cases.normal(5), 37.5
    q = quantize(torch.from_numpy(x), NVFP4, amax=torch.tensor([amax]))
    assert_equals_oracle(q, oracle.nvfp4(x, amax=amax))
    own = quantize(torch.from_numpy(x), NVFP4)
    given = quantize(torch.from_numpy(x), NVFP4, amax=own.amax)
    assert torch.equal(own.codes, given.codes) and torch.equal(own.scales, given.scales)


def test_the_input_is_neither_changed_nor_kept():
    x = torch.from_numpy(cases.normal(6)).requires_grad_()
    before = x.detach().clone()
    q = quantize(x, NVFP4)
    assert torch.equal(x, before) and not q.dequantize().requires_grad
    codes = q.codes.clone()
    with torch.no_grad():
        x.zero_()
    assert torch.equal(q.codes, codes)
