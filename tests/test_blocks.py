"""Shapes of tensors and of their scales, views that are not contiguous, and what is refused."""

import itertools

import numpy as np
import pytest
import torch

from fp4repro import FP8, MXFP4, MXFP8, NVFP4, BlockFormat, RandomKey, fake_quantize, hadamard, quantize
from fp4repro.core import formats
from fp4repro.core.quantize import NonFiniteError, quantize_operand
from fp4repro.errors import Fp4ReproError

pytestmark = pytest.mark.usefixtures("eager")
TILE, COLUMNS = NVFP4.with_block(16, 16), NVFP4.with_block(16, 1)
CALLS = {"quantize": quantize, "fake_quantize": fake_quantize, "quantize_operand": quantize_operand}
NONFINITE = [float("nan"), float("inf"), -float("inf")]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "fmt, shape, codes, scales",
    [
        (NVFP4, (4, 32), (4, 16), (4, 2)),
        (NVFP4, (1, 16), (1, 8), (1, 1)),
        (NVFP4, (3, 2, 48), (3, 2, 24), (3, 2, 3)),
        (TILE, (16, 16), (16, 8), (16, 1)),
        (TILE, (32, 48), (32, 24), (32, 3)),
        (TILE, (2, 8, 32), (2, 8, 16), (2, 8, 2)),
        (COLUMNS, (32, 6), (32, 3), (2, 6)),
        (COLUMNS, (16, 2), (16, 1), (1, 2)),
        (MXFP4, (2, 64), (2, 32), (2, 2)),
        (MXFP4, (1, 32), (1, 16), (1, 1)),
        (MXFP8, (2, 64), (2, 64), (2, 2)),
        (FP8, (3, 200), (3, 200), (3, 2)),
        (FP8, (1, 100), (1, 100), (1, 1)),
        (FP8.with_block(128, 128), (130, 200), (130, 200), (130, 2)),
        (FP8.with_block(128, 128), (128, 128), (128, 128), (128, 1)),
    ],
    ids=lambda v: f"{v.name}{v.block}" if isinstance(v, BlockFormat) else str(v),
)
def test_shapes_as_stored(fmt, shape, codes, scales):
    x = normal(*shape)
    q = quantize(x, fmt)
    assert q.codes.shape == codes and q.codes.dtype == torch.uint8
    assert q.scales.shape == scales
    assert q.amax.shape == () and q.amax.dtype == torch.float32
    assert q.shape == shape and q.dequantize().shape == shape
    scale_bytes = q.scales.numel() * (4 if fmt.scale is formats.FP32 else 1)
    assert q.nbytes == q.codes.numel() + scale_bytes + 4


def test_bits_a_value():
    q = quantize(normal(256, 256), NVFP4)
    assert (q.nbytes - 4) * 8 / 256**2 == 4.5 == NVFP4.bits_per_value
    assert MXFP4.bits_per_value == 4.25 and MXFP8.bits_per_value == 8.25
    for fmt in (NVFP4, COLUMNS, TILE, MXFP4, FP8):
        q = quantize(normal(256, 256), fmt)
        assert (q.nbytes - 4) * 8 / 256**2 == fmt.bits_per_value


def test_a_tile_scale_is_repeated_on_its_rows():
    q = quantize(normal(64, 32), TILE)
    scales = q.scales.view(torch.uint8).view(4, 16, 2)
    assert (scales == scales[:, :1]).all()
    assert len(scales.unique()) > 4


@pytest.mark.parametrize("fmt", [NVFP4, TILE, COLUMNS, MXFP4, FP8], ids=lambda f: f"{f.name}{f.block}")
def test_leading_axes_and_views_give_the_same_bytes(fmt):
    flat = normal(32, 64)
    expected, key = quantize(flat, fmt), RandomKey(1)
    random = quantize(flat, fmt, "stochastic", key)
    views = {
        "3d": flat.view(2, 16, 64),
        "4d": flat.view(2, 4, 4, 64),
        "column-major": flat.T.contiguous().T,
        "strided": torch.stack([flat, flat], 1)[:, 1],
        "offset": torch.cat([torch.zeros(3), flat.flatten()])[3:].view(32, 64),
        "wider": torch.cat([flat, flat], 1)[:, 64:],
    }
    for name, x in views.items():
        q = quantize(x, fmt)
        assert torch.equal(q.codes.flatten(), expected.codes.flatten()), name
        assert torch.equal(q.scales.float().flatten(), expected.scales.float().flatten()), name
        assert q.dequantize().shape == x.shape
        assert torch.equal(fake_quantize(x, fmt).view(32, 64), expected.dequantize()), name
        q = quantize(x, fmt, "stochastic", key)
        assert torch.equal(q.codes.flatten(), random.codes.flatten()), name


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "x, words",
    [
        (torch.zeros(16), "at least two axes, got shape (16,)"),
        (torch.tensor(1.0), "at least two axes"),
        (torch.zeros(0, 16), "empty"),
        (torch.zeros(16, 0), "empty"),
        (torch.zeros(4, 0, 16), "empty"),
        (torch.zeros(16, 16, dtype=torch.int32), "floating-point"),
        (torch.zeros(16, 16, dtype=torch.bool), "floating-point"),
        (torch.zeros(16, 16, dtype=torch.complex64), "floating-point"),
        (torch.zeros(16, 24), "last axis to be a multiple of 16, got 24"),
        (torch.zeros(16, 8), "last axis to be a multiple of 16, got 8"),
    ],
    ids=lambda v: str(tuple(v.shape)) if isinstance(v, torch.Tensor) else "",
)
def test_refused_with_a_sentence(call, x, words):
    with pytest.raises(Fp4ReproError) as error:
        CALLS[call](x, NVFP4)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_refused_for_tiles_columns_and_pairs():
    for fmt, shape, words in (
        (TILE, (24, 32), "leading axes to be a multiple of 16, got 24"),
        (TILE, (3, 8, 32), "leading axes to be a multiple of 16, got 24"),
        (COLUMNS, (24, 32), "leading axes to be a multiple of 16"),
        (COLUMNS, (32, 5), "pairs of columns, got 5"),
        (MXFP4, (4, 48), "multiple of 32, got 48"),
    ):
        with pytest.raises(Fp4ReproError) as error:
            quantize(torch.zeros(shape), fmt)
        assert words in str(error.value)


@pytest.mark.parametrize("block", [(1, 8), (1, 24), (16, 2), (2, 8)], ids=str)
def test_a_block_the_kernels_cannot_view_works_or_is_refused(block):
    x = normal(48, 48)
    try:
        fake = fake_quantize(x, NVFP4.with_block(*block))
    except Fp4ReproError as error:
        assert str(block[1]) in str(error)
        return
    error = ((fake - x).norm() / x.norm()).item()
    assert 0.05 < error < 0.12


ZEROS = torch.zeros(16, 16)
WRONG = {
    "rounding": (lambda: quantize(ZEROS, NVFP4, "nearset"), "must be nearest or stochastic"),
    "no key": (lambda: quantize(ZEROS, NVFP4, "stochastic"), "needs a key"),
    "no key, fake": (lambda: fake_quantize(ZEROS, NVFP4, "stochastic"), "needs a key"),
    "random bits": (
        lambda: quantize(ZEROS, NVFP4, "stochastic", RandomKey(), random_bits=4),
        "8, 16 or 32, not 4",
    ),
    "nonfinite": (lambda: quantize(ZEROS, NVFP4, nonfinite="ignore"), "raise"),
    "order": (lambda: NVFP4.replace(order="te-2.12"), "te-2.13"),
    "scale rounding": (lambda: NVFP4.replace(scale_rounding="even"), "nearest, up or down"),
    "four over six": (lambda: NVFP4.replace(four_over_six="max"), "mse, mae"),
    "four over six of e4m3": (lambda: MXFP8.replace(four_over_six="mse"), "E2M1"),
    "block": (lambda: NVFP4.with_block(-1, 16), "block"),
    "element": (lambda: BlockFormat("odd", formats.FP32, (1, 16), formats.E4M3), "packed"),
    "hadamard shape": (lambda: hadamard(torch.zeros(4, 24)), "multiple of 16"),
    "hadamard size": (lambda: hadamard(torch.zeros(4, 24), 3), "must be one of 2, 4, 8"),
    "hadamard size 0": (lambda: hadamard(ZEROS, 0), "must be one of"),
    "hadamard signs": (lambda: hadamard(ZEROS, signs="random"), "te, none or drawn"),
    "hadamard key": (lambda: hadamard(ZEROS, signs="drawn"), "RandomKey"),
    "hadamard axis": (lambda: hadamard(ZEROS, axis=2), "axis"),
    "hadamard of integers": (lambda: hadamard(torch.ones(4, 16, dtype=torch.int32)), "float"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused_with_a_sentence(name):
    call, words = WRONG[name]
    with pytest.raises(Fp4ReproError) as error:
        call()
    assert words in str(error.value)


@pytest.mark.parametrize("bad", NONFINITE, ids=str)
@pytest.mark.parametrize("fmt", [NVFP4, TILE, COLUMNS, MXFP4, FP8], ids=lambda f: f"{f.name}{f.block}")
@pytest.mark.parametrize("call", CALLS)
def test_nonfinite_values_are_refused(call, fmt, bad):
    for row, column in itertools.product((0, 15), (0, 31)):
        x = normal(32, 64)
        x[row, column] = bad
        with pytest.raises(NonFiniteError) as error:
            CALLS[call](x, fmt)
        message = str(error.value)
        assert "(32, 64)" in message and "NaN or infinity" in message and fmt.name in message
        with pytest.raises(NonFiniteError):
            CALLS[call](x.bfloat16(), fmt)


@pytest.mark.parametrize("bad", NONFINITE, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", [NVFP4, TILE, COLUMNS, MXFP4, FP8], ids=lambda f: f"{f.name}{f.block}")
def test_nonfinite_values_poison_the_tensor_on_request(fmt, rounding, bad):
    x = normal(128, 128)
    x[3, 40] = bad
    options = {"rounding": rounding, "key": RandomKey(), "nonfinite": "poison"}
    assert fake_quantize(x, fmt, **options).isnan().all()
    q = quantize(x, fmt, **options)
    assert not q.amax.isfinite()
    assert q.dequantize().isnan().all()
    operand, decode = quantize_operand(x, fmt, **options)
    assert (operand.float() * decode).isnan().all()
    clean = normal(128, 128)
    assert torch.equal(fake_quantize(clean, fmt, nonfinite="poison"), fake_quantize(clean, fmt))


@pytest.mark.parametrize("bad", NONFINITE, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_given_amax_does_not_hide_nonfinite_values(call, bad):
    x = normal(32, 64)
    x[3, 40] = bad
    with pytest.raises(NonFiniteError):
        CALLS[call](x, NVFP4, amax=torch.tensor(5.0))
    poisoned = fake_quantize(x, NVFP4, nonfinite="poison", amax=torch.tensor(5.0))
    assert poisoned.isnan().all()


def test_an_infinite_given_amax_is_refused():
    for amax in NONFINITE[:2]:
        with pytest.raises(NonFiniteError):
            quantize(normal(32, 64), NVFP4, amax=torch.tensor(amax))


def test_float64_beyond_float32_is_refused_and_not_saturated():
    x = normal(16, 16).double()
    x[0, 0] = 1e39
    with pytest.raises(NonFiniteError):
        quantize(x, NVFP4)
    assert np.isfinite(quantize(x.clamp(max=3e38), NVFP4).dequantize().numpy()).all()
