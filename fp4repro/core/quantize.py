"""The one quantiser: every operand, optimizer state and exported weight passes through here.

`quantize` stores, `fake_quantize` returns the dequantised values, `quantize_operand` the BF16 values
of code times block scale with the tensor scale apart, for a product. All three share `Prepared`, so
that they agree to the bit. A tensor with a NaN or an infinity is refused (`nonfinite="raise"`) or
becomes NaN as a whole (`"poison"`): conversions to E2M1 would hide it otherwise.
"""

from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from fp4repro.core import kernels
from fp4repro.core.blocks import Blocks
from fp4repro.core.compiled import compiled
from fp4repro.core.formats import E2M1, BlockFormat
from fp4repro.core.pairs import halves, make_codes_of_pairs
from fp4repro.core.random import RandomKey, fields_of, words_needed
from fp4repro.core.tensor import QuantizedTensor, kernel_format, pack, store_scales
from fp4repro.errors import Fp4ReproError

Rounding = Literal["nearest", "stochastic"]
NonFinite = Literal["raise", "poison"]


class NonFiniteError(Fp4ReproError):
    """A tensor to be quantised holds a NaN or an infinity."""


@dataclass(frozen=True)
class Prepared:
    """A tensor whose scales are known, ready for the last pass."""

    matrix: Tensor
    blocks: Blocks
    format: BlockFormat
    amax: Tensor  # float32 scalar
    s: Tensor  # block decode scales, in the shape of the blocks
    e: Tensor  # element multipliers, likewise
    decode: Tensor  # the tensor's decode scale, float32 scalar

    @property
    def in_pairs(self) -> bool:
        """Whether two columns can go through the last pass as one: see `pairs`."""
        m = self.matrix
        aligned = m.dtype == torch.bfloat16 and m.shape[1] % 2 == 0 and m.storage_offset() % 2 == 0
        return aligned and self.blocks.compare and self.format.element is E2M1 and self.format.exact_in_bf16

    def apply(self, output: str, rounding: Rounding, key: RandomKey | None, bits: int) -> Tensor:
        """The kernel's `output` in the matrix's padded shape; codes of pairs come packed."""
        x, s, e = self.blocks.view_with_scales(self.matrix, self.s, self.e)
        random = None
        if rounding == "stochastic":
            random = _noise(x, key, bits)
        used = bits if random is not None else 0
        fmt = kernel_format(self.format)
        if output == "codes" and not used and self.in_pairs:
            return compiled(make_codes_of_pairs, fmt)(x.view(torch.int32), *halves(e))
        return compiled(kernels.make_apply, fmt, output, used, self.blocks.compare)(
            x, s, e, self.decode, random
        )

    def store(self, rounding: Rounding, key: RandomKey | None, bits: int) -> QuantizedTensor:
        """Packed codes and scales."""
        codes, shape = self.apply("codes", rounding, key, bits), self.blocks.shape
        if codes.numel() < self.matrix.numel():
            codes = codes.view(*shape[:-1], -1)
        else:
            codes = pack(self.blocks.restore(codes), self.format)
        scales = store_scales(self.blocks.store(self.s), self.format)
        stored = QuantizedTensor(codes, scales, self.amax, self.format, shape)
        return stored.with_tensor_scale(self.decode)


def _noise(x: Tensor, key: RandomKey | None, bits: int) -> Tensor:
    if key is None:
        raise Fp4ReproError("stochastic rounding needs a key: pass key=RandomKey(seed, step, layer, role)")
    like = torch.empty(words_needed(x.numel(), bits), dtype=torch.int8, device=x.device)
    words = compiled(kernels.make_noise)(like, key.tensor(x.device))
    return fields_of(words, x.numel(), bits).view(x.shape)


def prepare(
    x: Tensor, fmt: BlockFormat, nonfinite: NonFinite = "raise", amax: Tensor | float | None = None
) -> Prepared:
    """First two passes: amax and scales; arguments as in `quantize`."""
    if not isinstance(x, Tensor):
        raise Fp4ReproError(f"what is quantised must be a torch tensor, got {type(x).__name__}")
    if not isinstance(fmt, BlockFormat):
        raise Fp4ReproError(f"a format must be a BlockFormat such as fp4repro.NVFP4, got {fmt!r}")
    if not x.is_floating_point():
        raise Fp4ReproError(f"only floating-point tensors can be quantised, got {x.dtype}")
    if nonfinite not in ("raise", "poison"):
        raise Fp4ReproError(f"nonfinite {nonfinite!r} must be raise or poison")
    blocks = Blocks.of(x.shape, fmt)
    matrix = blocks.matrix(x.detach())
    block_amax = compiled(kernels.make_amax, *fmt.block)(blocks.for_amax(matrix))
    own = block_amax.amax()
    if nonfinite == "raise" and not bool(own.isfinite()):
        raise NonFiniteError(
            f"a tensor of shape {tuple(x.shape)} to be quantised to {fmt.name} holds NaN or infinity, or "
            "values beyond FP32: look upstream for the step at which it appeared, or pass "
            "nonfinite='poison' to carry it on"
        )
    amax = own if amax is None else _given_amax(amax, own)
    s, e, decode = _scales(fmt, block_amax, amax)
    if fmt.four_over_six:
        s, e = _choose_four_or_six(matrix, blocks, fmt, block_amax, amax, (s, e, decode))
    return Prepared(matrix, blocks, fmt, amax, s, e, decode)


def _given_amax(amax: Tensor | float, own: Tensor) -> Tensor:
    """An amax from elsewhere, which a NaN or an infinity in the tensor still poisons."""
    amax = torch.as_tensor(amax, dtype=torch.float32, device=own.device).reshape(())
    if amax.device.type == "cpu" and not 0 <= float(amax) < float("inf"):
        raise NonFiniteError(f"the amax given is {float(amax)}; it must be a finite magnitude, not negative")
    return torch.where(own.isfinite(), amax, torch.nan)


def _scales(fmt: BlockFormat, block_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flat = block_amax.reshape(-1)  # one compilation whatever the shape of the blocks
    s, e, decode = compiled(kernels.make_scales, kernel_format(fmt))(flat, amax)
    return s.view(block_amax.shape), e.view(block_amax.shape), decode


def _choose_four_or_six(
    matrix: Tensor, blocks: Blocks, fmt: BlockFormat, block_amax: Tensor, amax: Tensor, six: tuple
) -> tuple[Tensor, Tensor]:
    """Per block the scale that maps its amax to 6 or to 4, whichever errs less; a tie takes 6."""
    # The block scale grows by 6/4 and its type's maximum must hold it: formats for this set a lower
    # `scale_target`, 256 in place of 448.
    four = _scales(fmt, block_amax * 1.5, amax)
    encode = kernels.tensor_scales(amax, fmt)[0]
    error = compiled(kernels.make_error, kernel_format(fmt), blocks.compare)
    x = blocks.view(matrix)
    six_error, four_error = (
        blocks.sum_to_blocks(error(x, blocks.spread(s), blocks.spread(e), encode), s.shape)
        for s, e in (six[:2], four[:2])
    )
    take_four = four_error < six_error
    return torch.where(take_four, four[0], six[0]), torch.where(take_four, four[1], six[1])


class Options(TypedDict, total=False):
    """What `quantize`, `fake_quantize` and `quantize_operand` take by name.

    random_bits  8 as in hardware, 16 or 32
    nonfinite    "raise" refuses NaN and infinity, "poison" makes the whole tensor NaN
    amax         float32 scalar to scale by in place of the tensor's own: that of a larger whole, or of
                 an earlier step; magnitudes above it saturate
    """

    random_bits: int
    nonfinite: NonFinite
    amax: Tensor | float | None


def _prepared(
    x: Tensor, fmt: BlockFormat, rounding: Rounding, *, random_bits: int = 8, **rest: object
) -> tuple[Prepared, int]:
    if rounding not in ("nearest", "stochastic"):
        raise Fp4ReproError(f"rounding {rounding!r} must be nearest or stochastic")
    return prepare(x, fmt, **rest), random_bits


def quantize(
    x: Tensor,
    format: BlockFormat,
    rounding: Rounding = "nearest",
    key: RandomKey | None = None,
    **options: Unpack[Options],
) -> QuantizedTensor:
    """Quantise `x` (..., K), blocks along the last axis, to packed codes and scales.

    rounding  of the elements: "nearest" (ties to even) or "stochastic" (needs `key`)
    options   see `Options`
    """
    prepared, bits = _prepared(x, format, rounding, **options)
    return prepared.store(rounding, key, bits)


def fake_quantize(
    x: Tensor,
    format: BlockFormat,
    rounding: Rounding = "nearest",
    key: RandomKey | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """`quantize(...).dequantize(x.dtype)` without the storage, bit for bit; shape and dtype of `x`."""
    prepared, bits = _prepared(x, format, rounding, **options)
    return prepared.blocks.restore(prepared.apply("fake", rounding, key, bits))


def quantize_operand(
    x: Tensor,
    format: BlockFormat,
    rounding: Rounding = "nearest",
    key: RandomKey | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """Code times block scale in BF16 (exact, shape of `x`), and the tensor's FP32 decode scale."""
    prepared, bits = _prepared(x, format, rounding, **options)
    return prepared.blocks.restore(prepared.apply("operand", rounding, key, bits)), prepared.decode
