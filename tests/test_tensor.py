"""Packed storage: nibbles, scale bytes, decoding, transposes, the swizzle, padding."""

import itertools

import cases
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch

from fp4repro import FP8, MXFP4, MXFP8, NVFP4, QuantizedTensor, quantize
from fp4repro.core import layout
from fp4repro.core.formats import E4M3, FP32, UE5M3
from fp4repro.core.tensor import load_scales, pack, store_scales, unpack
from fp4repro.errors import Fp4ReproError

pytestmark = pytest.mark.usefixtures("eager")
TILE, COLUMNS = NVFP4.with_block(16, 16), NVFP4.with_block(16, 1)


def by_hand(q: QuantizedTensor) -> np.ndarray:
    """Values from the stored bytes alone, through ml_dtypes."""
    packed = q.codes.numpy()
    codes = np.empty(q.shape, np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed & 15, packed >> 4
    elements = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = q.scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    rows, columns = q.format.block
    scales = np.repeat(scales, rows, 0) if columns == 1 else np.repeat(scales, columns, -1)
    return elements * scales * q.tensor_scale.numpy()


@pytest.mark.parametrize("fmt", [NVFP4, TILE, COLUMNS], ids=lambda f: str(f.block))
def test_decoding_follows_from_the_bytes(fmt):
    for name in ("gauss", "outlier", "zeroblock", "mixedsubnormal", "huge", "ties"):
        q = quantize(torch.from_numpy(cases.NAMED[name]), fmt)
        assert np.array_equal(q.dequantize().numpy(), by_hand(q)), name


def test_a_ladder_packs_to_known_bytes():
    ladder = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6]) * 448
    q = quantize(torch.stack([ladder, ladder.flip(0)]), NVFP4)
    expected = [0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x7F]
    assert q.codes[0].tolist() == expected
    assert q.codes[1].tolist() == [(b & 15) << 4 | b >> 4 for b in reversed(expected)]
    assert q.scales.view(torch.uint8).unique().tolist() == [0x7E]
    assert torch.equal(q.dequantize()[0], ladder)


def test_pack_and_unpack_are_inverse_for_all_pairs():
    pairs = torch.tensor(list(itertools.product(range(16), range(16))), dtype=torch.uint8)  # (256, 2)
    packed = pack(pairs, NVFP4)
    assert packed.flatten().tolist() == [low | high << 4 for low, high in pairs.tolist()]
    assert torch.equal(unpack(packed, NVFP4), pairs)
    cube = pairs.view(4, 4, 32)
    assert pack(cube, NVFP4).shape == (4, 4, 16)
    assert torch.equal(unpack(pack(cube, NVFP4), NVFP4), cube)
    assert torch.equal(pack(pairs, FP8), pairs) and torch.equal(unpack(pairs, FP8), pairs)


def test_every_scale_byte_is_stored_and_read():
    bits = torch.arange(0, 0x7F, dtype=torch.uint8)
    values = load_scales(bits.view(torch.float8_e4m3fn), NVFP4)
    assert values.tolist() == oracle.grid(oracle.E4M3).tolist()
    assert torch.equal(store_scales(values, NVFP4).view(torch.uint8), bits)
    exponents = torch.arange(1, 255, dtype=torch.uint8)
    values = load_scales(exponents.view(torch.float8_e8m0fnu), MXFP4)
    assert torch.equal(store_scales(values, MXFP4).view(torch.uint8), exponents)
    wide = NVFP4.replace(scale=UE5M3)
    codes = torch.arange(248, dtype=torch.uint8)
    values = load_scales(codes, wide)
    assert values[0] == 0 and values[1] == 2.0**-17 and values[-1] == 61440
    assert torch.equal(store_scales(values, wide), codes)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4, MXFP8, FP8], ids=lambda f: f.name)
def test_element_times_scale_is_exact_in_bf16(fmt):
    q = quantize(torch.from_numpy(cases.family("wide_blocks", 1024)).view(-1, 256), fmt)
    operand = q.operand()
    assert operand.dtype == torch.bfloat16
    assert torch.equal(operand.float() * q.tensor_scale, q.dequantize())
    assert fmt.exact_in_bf16


def test_an_operand_that_bf16_cannot_hold_is_refused():
    e4m3_twice = MXFP8.replace(name="e4m3 with e4m3 scales", scale=E4M3, tensor_scale=True)
    assert e4m3_twice.exact_in_bf16  # 4 and 4 bits make 8
    wider = MXFP8.replace(name="fp32 scales", scale=FP32)
    with pytest.raises(Fp4ReproError, match="does not fit BF16"):
        quantize(torch.ones(2, 64), wider).operand()


def test_dequantised_in_another_type_is_rounded_once():
    q = quantize(torch.from_numpy(cases.normal(1)), NVFP4)
    exact = q.dequantize()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(q.dequantize(dtype), exact.to(dtype))


@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (128, 16), (32, 160)], ids=str)
def test_the_transpose_is_that_of_the_quantised_transpose(shape):
    x = torch.from_numpy(cases.normal(2, shape))
    upright = x.T.contiguous()
    for given, turned in ((COLUMNS, NVFP4), (NVFP4, COLUMNS), (TILE, TILE)):
        q, expected = layout.transpose(quantize(x, given)), quantize(upright, turned)
        assert q.format.block == turned.block and q.shape == upright.shape
        assert torch.equal(q.codes, expected.codes)
        assert torch.equal(q.scales.view(torch.uint8), expected.scales.view(torch.uint8))
        assert torch.equal(q.dequantize(), quantize(x, given).dequantize().T)
        back = layout.transpose(q)
        assert torch.equal(back.codes, quantize(x, given).codes)


def test_transposing_is_not_transposing_bytes():
    q = quantize(torch.from_numpy(cases.normal(3, (32, 32))), TILE)
    turned = layout.transpose(q).codes
    assert turned.shape != q.codes.T.shape or not torch.equal(turned, q.codes.T)
    with pytest.raises(Fp4ReproError, match="only matrices"):
        layout.transpose(quantize(torch.zeros(2, 16, 16), NVFP4))


@pytest.mark.parametrize("shape", [(1, 1), (17, 3), (100, 5), (128, 4), (129, 4), (256, 12), (300, 9)])
def test_swizzle_puts_each_scale_where_the_formula_says(shape):
    rows, columns = shape
    rng = np.random.default_rng(0)
    bits = torch.from_numpy(rng.integers(1, 0x7F, shape, np.uint8))
    scales = bits.view(torch.float8_e4m3fn)
    flat = layout.swizzle_scales(scales)
    assert flat.dtype == scales.dtype
    high, wide = layout.padded_scales_shape(rows, columns)
    assert (high % 128, wide % 4) == (0, 0) and high - rows < 128 and wide - columns < 4
    expected = np.zeros(high * wide, np.uint8)
    for r, c in itertools.product(range(rows), range(columns)):
        expected[oracle.swizzled_offset(r, c, columns)] = bits[r, c]
    assert np.array_equal(flat.view(torch.uint8).numpy().ravel(), expected)
    back = layout.unswizzle_scales(flat, rows, columns)
    assert torch.equal(back.view(torch.uint8), bits)


def test_a_swizzled_buffer_of_another_size_is_refused():
    with pytest.raises(Fp4ReproError, match="512"):
        layout.unswizzle_scales(torch.zeros(511, dtype=torch.uint8), 100, 4)
    with pytest.raises(Fp4ReproError):
        layout.swizzle_scales(torch.zeros(4, 4))
