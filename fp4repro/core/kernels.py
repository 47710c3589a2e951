"""The arithmetic of block quantisation in its three passes, as functions of plain tensors.

    amax     block magnitudes |x|
    scales   block amax, tensor amax -> block decode scales s, element multipliers e
    apply    x -> q = round(x e), returned as q s (a product's operand), as (q s) times the tensor's
             decode scale (fake quantisation) or as codes

Order of operations: Transformer Engine's since 2.14, bit for bit (docs/numerics.md), in FP32 with one
rounding a step. Three passes and not one graph, since the scale chain would otherwise be evaluated
anew for every element. A matrix (R, C) comes in one of these views, made by the caller: a view made
inside would cost inductor its vectors.

    rows     1 x c     (R C / c, c) for amax; (R C / 16, 16) for apply, each scale repeated
    columns  r x 1     (R / r, r, C); see also `pairs`
    tiles    r x c     (R, C) for amax; as rows for apply, FP32 in 16 x 16 as (R / 16, 16, C / 16, 16)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fp4repro.core.compiled import across_vectors, by_rows
from fp4repro.core.formats import E2M1, FP32, FP32_MAX, BlockFormat, Minifloat
from fp4repro.core.random import hash_index
from fp4repro.core.rounding import ROUND, round_nearest, round_stochastic

LANES = 16  # width of the rows view in `apply`: a block, and what inductor vectorises best


def make_amax(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    """Block amax; rows and columns views keep the reduced axis, tiles reduce a matrix (R, C). A side
    of 0 is one that varies from tensor to tensor."""

    @across_vectors
    @by_rows
    def amax_of_rows(x: Tensor) -> Tensor:
        x = x.view(x.shape[0], columns) if columns else x
        return x.float().abs().amax(-1, keepdim=True)  # (blocks, 1)

    @by_rows
    def amax_of_columns(x: Tensor) -> Tensor:
        x = x.view(x.shape[0], rows, x.shape[2]) if rows else x
        return x.float().abs().amax(1, keepdim=True)  # (R/r, 1, C)

    def amax_of_tiles(x: Tensor) -> Tensor:
        high, wide = x.shape
        tiles = x.view(high // rows, rows, wide // columns, columns)
        return tiles.float().abs().amax((1, 3))  # (R/r, C/c)

    if columns == 1:
        return amax_of_columns
    return amax_of_tiles if rows > 1 else amax_of_rows


def tensor_scales(amax: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """FP32 encode and decode scale of the tensor from its amax; 1 and 1 for one-level formats.

    Both come from here, so that decoding always inverts encoding, also where 2688 / amax overflows.
    A tensor with a NaN or an infinity gets a NaN decode scale: it is poisoned as a whole.
    """
    one = torch.ones_like(amax)
    encode = one
    if fmt.tensor_scale:
        # A tensor over a tensor: `scalar / tensor` is a reciprocal and a product, two roundings.
        encode = (torch.full_like(amax, fmt.scale_target * fmt.target) / amax).clamp_max(FP32_MAX)
        encode = torch.where((amax == 0) | (encode == 0), one, encode)
    return encode, torch.where(amax.isfinite(), one / encode, torch.nan)


def make_scales(fmt: BlockFormat) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """(block amax, tensor amax) -> block decode scales s, element multipliers e, tensor decode scale."""
    round_scale = ROUND[fmt.scale_rounding]

    def scales(block_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        encode, decode = tensor_scales(amax, fmt)
        target = torch.full_like(amax, fmt.target)
        inverse = torch.ones_like(amax) / target
        # The paper's equation, which TE followed until 2.13, divides: (amax_b / 6) * s_enc.
        te = fmt.order == "te"
        wanted = block_amax * (encode * inverse) if te else block_amax / target * encode
        s = round_scale(wanted.clamp_max(fmt.scale.max), fmt.scale)
        if fmt.scale is FP32:  # a zero block has no scale of its own
            s = torch.where(s == 0, 1.0, s)
        step = s * torch.where(decode.isnan(), 1.0, decode)
        return s, (torch.ones_like(step) / step).clamp_max(FP32_MAX), decode

    return scales


def rounded(
    x: Tensor, e: Tensor, random: Tensor | None, fmt: BlockFormat, bits: int, compare: bool
) -> tuple[Tensor, Tensor]:
    """FP32 x -> (magnitude of round(x e) on the element's grid, x e)."""
    y = x * e
    a = y.abs().clamp_max_(fmt.element.max)
    if bits:
        a = round_stochastic(a, fmt.element, random, bits, compare)
    else:
        a = round_nearest(a, fmt.element, compare)
    return a, y


def signed(a: Tensor, y: Tensor) -> Tensor:
    """Magnitude `a`, which is overwritten, with the sign of y. A y of -0.0 gives 0.0, as in the reference:
    its sign bit does not count. A choice is the least work in a compiled loop, and in eager the most."""
    traced = type(y) is not Tensor
    return torch.where(y < 0, -a, a) if traced else a.mul_(y.sign_())


def make_apply(fmt: BlockFormat, output: str, bits: int, compare: bool) -> Callable[..., Tensor]:
    """The last pass. `output`: "operand" (BF16 q s), "fake" ((q s) decode in x's dtype), "codes"
    (uint8, one an element). `bits`: random bits an element, 0 rounds to nearest. `compare`: see
    `rounding`."""

    @by_rows
    def apply(x: Tensor, s: Tensor, e: Tensor, decode: Tensor, random: Tensor | None) -> Tensor:
        if not compare:  # tells the compiler that the last side is constant
            x = x.view(*x.shape[:-1], LANES)
        a, y = rounded(x.float(), e, random, fmt, bits, compare)
        if output == "codes":
            return encode_elements(a, y < 0, fmt.element, compare)
        q = signed(a, y).mul_(s)
        return q.to(torch.bfloat16) if output == "operand" else q.mul_(decode).to(x.dtype)

    return apply


def make_noise() -> Callable[[Tensor, Tensor], Tensor]:
    def noise(like: Tensor, words: Tensor) -> Tensor:
        """One random 32-bit word for each element of `like` (only its length counts)."""
        return hash_index(torch.arange(like.shape[0], dtype=torch.int32, device=like.device), words)

    return noise


def encode_elements(a: Tensor, negative: Tensor | None, element: Minifloat, compare: bool = False) -> Tensor:
    """Codes (uint8) of magnitudes on an element's grid: sign bit above exponent above mantissa."""
    sign_bit = 1 << element.bits - 1
    if compare and element is E2M1:
        code = torch.minimum(torch.minimum(a * 2.0, a + 2.0), a * 0.5 + 4.0)  # to 2, to 4, to 6
        return (code + torch.where(negative, float(sign_bit), 0.0)).to(torch.uint8)
    offset = element.emin + 126 << element.mantissa_bits  # exponent field 1 is the smallest normal
    normal = (a.view(torch.int32) >> 23 - element.mantissa_bits) - offset
    subnormal = (a * (1.0 / element.min_step)).to(torch.int32)
    code = torch.where(a < element.min_normal, subnormal, normal)
    if negative is not None:
        code = code | torch.where(negative, sign_bit, 0)
    return code.to(torch.uint8)


def decode_elements(codes: Tensor, element: Minifloat, compare: bool = False) -> Tensor:
    """FP32 values of element codes (uint8, one an element)."""
    word = codes.to(torch.int32)
    magnitude = word & (1 << element.bits - element.signed) - 1
    if compare and element is E2M1:
        m = magnitude.to(torch.float32)
        a = torch.where(m < 4.0, m * 0.5, torch.where(m < 6.0, m - 2.0, m * 2.0 - 8.0))
    else:
        offset = element.emin + 126 << element.mantissa_bits
        normal = (magnitude + offset << 23 - element.mantissa_bits).view(torch.float32)
        subnormal = magnitude.to(torch.float32) * element.min_step
        a = torch.where(magnitude < 1 << element.mantissa_bits, subnormal, normal)
    return torch.where(word > magnitude, -a, a)


def make_decode(fmt: BlockFormat, output: torch.dtype, tensor_level: bool, compare: bool) -> Callable:
    """codes, s, tensor decode scale -> q s, or (q s) decode where `tensor_level`, as `output`."""

    @by_rows
    def decode(codes: Tensor, s: Tensor, tensor_decode: Tensor) -> Tensor:
        if not compare:
            codes = codes.view(codes.shape[0], LANES)
        values = decode_elements(codes, fmt.element, compare) * s
        return (values * tensor_decode if tensor_level else values).to(output)

    return decode


def make_pack() -> Callable[[Tensor], Tensor]:
    @by_rows
    def pack(words: Tensor) -> Tensor:
        """Two 4-bit codes, seen as the bytes of an int16, into one byte: the first one low."""
        return (words | words >> 4).to(torch.uint8)

    return pack


def make_unpack() -> Callable[[Tensor], Tensor]:
    @by_rows
    def unpack(packed: Tensor) -> Tensor:
        """The inverse of `pack`: int16 whose bytes are the two codes."""
        wide = packed.to(torch.int16)
        return wide & 0xF | (wide & 0xF0) << 4

    return unpack


def make_error(fmt: BlockFormat, compare: bool) -> Callable[..., Tensor]:
    """Error of nearest rounding under given scales, by `fmt.four_over_six`'s measure, summed over the
    16 lanes or the rows of the view; pairwise in a fixed order, so that a choice that rests on it is
    the same compiled or not."""

    @by_rows
    def error(x: Tensor, s: Tensor, e: Tensor, encode: Tensor) -> Tensor:
        if not compare:
            x = x.view(x.shape[0], LANES)
        y = x.float() * e
        q = round_nearest(y.abs().clamp_max(fmt.element.max), fmt.element, compare)
        d = x.float().abs() * encode - q * s  # under the tensor scale: no square overflows
        d = d * d if fmt.four_over_six == "mse" else d.abs()
        return pairwise_sum(d, 1)

    return error


def pairwise_sum(t: Tensor, axis: int) -> Tensor:
    """Sum along `axis` (kept, of size 1) in a fixed tree."""
    while (size := t.shape[axis]) > 1:
        half = size // 2
        low, high, rest = t.split([half, half, size - 2 * half], axis)
        t = torch.cat([low + high, rest], axis) if size % 2 else low + high
    return t
