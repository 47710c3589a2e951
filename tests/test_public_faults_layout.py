"""Faults reported in public around NVFP4, each as a test named after its entry: layout and sharding.

Sections D (layout, padding, shapes), F6 (simulated and stored), G1 (parallel amax), I2 (nibbles); the
others are in test_public_faults.py, which also lists what has no test.
"""

import cases
import numpy as np
import oracle
import pytest
import torch
from test_public_faults import COLUMNS, every_format, normal, relative_error, scale_bytes

from fp4repro import FP8, MXFP4, NVFP4, fake_quantize, hadamard, matmul, quantize
from fp4repro.core import layout
from fp4repro.errors import Fp4ReproError

pytestmark = pytest.mark.usefixtures("eager")


@pytest.mark.parametrize("rows", [1, 17, 100])
def test_D1_padding_is_zero_whatever_memory_held(rows, monkeypatch):
    x = normal(rows, 48)
    expected = quantize(x, NVFP4)

    def dirty(function):
        def filled(*args, **kwargs):
            out = function(*args, **kwargs)
            return out.view(torch.uint8).fill_(0x7F).view(out.dtype) if out.numel() and out.dim() else out

        return filled

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, dirty(getattr(torch, name)))
    q = quantize(x, NVFP4)
    assert torch.equal(q.codes, expected.codes) and torch.equal(scale_bytes(q), scale_bytes(expected))
    flat = layout.swizzle_scales(q.scales).view(torch.uint8).flatten()
    used = [oracle.swizzled_offset(r, c, 3) for r in range(rows) for c in range(3)]
    padding = torch.ones(len(flat), dtype=torch.bool)
    padding[used] = False
    assert not flat[padding].any() and padding.sum() == len(flat) - 3 * rows
    assert flat[used].tolist() == scale_bytes(q).flatten().tolist()


@pytest.mark.parametrize("shape", [(256, 12), (130, 5), (7, 1)], ids=str)
def test_D2_swizzle_against_the_formula_and_not_its_inverse(shape):
    scales = torch.arange(shape[0] * shape[1]).remainder(251).to(torch.uint8).view(shape)
    flat = layout.swizzle_scales(scales).flatten()
    for r, c in np.ndindex(shape):
        assert flat[oracle.swizzled_offset(r, c, shape[1])] == scales[r, c]


def test_D4_three_axes_and_views_give_the_same_bytes():
    flat = normal(16, 64)
    expected = quantize(flat, NVFP4)
    for x in (flat.view(2, 8, 64), flat.T.contiguous().T, torch.cat([flat, flat], 1)[:, :64]):
        q = quantize(x, NVFP4)
        assert torch.equal(q.codes.view(16, 32), expected.codes)
        assert q.dequantize().shape == x.shape and q.codes.shape == (*x.shape[:-1], 32)


@pytest.mark.parametrize("side", [16, 24, 32, 48, 100, 128])
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4, FP8], ids=lambda f: f.name)
def test_D5_a_side_works_as_if_padded_or_is_refused(fmt, side):
    x = normal(8, side)
    if side % fmt.block[1] and not fmt.pads:
        with pytest.raises(Fp4ReproError, match=f"multiple of {fmt.block[1]}, got {side}"):
            quantize(x, fmt)
        return
    padded = torch.zeros(8, 128)
    padded[:, :side] = x
    assert torch.equal(fake_quantize(x, fmt), fake_quantize(padded, fmt)[:, :side])


def test_D6_nothing_is_computed_from_padding():
    x = normal(17, 48) + 3
    q = quantize(x, FP8)
    assert q.scales.shape == (17, 1) and q.codes.shape == (17, 48)
    assert q.amax == x.abs().max() and q.scales.float().min() > 0
    assert q.nbytes == 17 * 48 + 17 + 4


@every_format
def test_F6_simulated_equals_stored(fmt):
    for name in ("gauss", "outlier", "zeroblock", "ties", "mixedsubnormal"):
        x = torch.from_numpy(cases.NAMED[name])
        for kind in (torch.float32, torch.bfloat16):
            fake, real = fake_quantize(x.to(kind), fmt), quantize(x.to(kind), fmt).dequantize(kind)
            assert torch.equal(fake, real) and fake.any()


@pytest.mark.parametrize("transformed", [False, True], ids=["plain", "hadamard"])
def test_G1_shards_share_the_largest_amax(transformed):
    """Shards of tokens with maxima 1 and 1000, and one without rows, reduced before quantising."""
    whole = torch.cat([normal(32, 64).clamp(-1, 1), normal(32, 64, seed=1) * 300]).bfloat16()
    shards = [whole[:32], whole[32:], whole[:0]]
    if transformed:
        whole, shards = hadamard(whole, axis=0), [hadamard(s, axis=0) for s in shards if len(s)]
    amax = torch.stack([s.abs().max().float() for s in shards if len(s)]).max()
    expected = quantize(whole, COLUMNS)
    parts = [quantize(s, COLUMNS, amax=amax) for s in shards if len(s)]
    assert torch.equal(torch.cat([p.codes for p in parts]), expected.codes)
    assert torch.equal(torch.cat([scale_bytes(p) for p in parts]), scale_bytes(expected))
    alone = quantize(shards[0], COLUMNS)
    assert not torch.equal(scale_bytes(alone), scale_bytes(parts[0]))


def test_I2_nibbles_and_the_number_of_bytes():
    ladder = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2)[None]
    q = quantize(ladder, NVFP4)
    assert q.codes.tolist() == [[0x10, 0x32, 0x54, 0x76] * 2]
    assert q.codes.shape == (1, 8)  # bytes, half as many as elements
    with pytest.raises(Fp4ReproError, match="got"):
        matmul(quantize(normal(16, 64), NVFP4), quantize(normal(16, 32), NVFP4))
    a, b = quantize(normal(16, 64), NVFP4), quantize(normal(24, 64, seed=1), NVFP4)
    assert relative_error(matmul(a, b), a.dequantize().double() @ b.dequantize().double().T) < 1e-6
