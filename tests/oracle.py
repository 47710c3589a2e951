"""An independent oracle: block quantisation in numpy and ml_dtypes, from the published formulas.

Every operation is one numpy float32 operation (one rounding, nearest even) or a cast of ml_dtypes;
where a formula is exact mathematics (powers of two, neighbours on a grid) it is computed in float64
or by search over all codes of the type. Nothing here imports fp4repro. Sources: arXiv 2509.25149,
appendix B; Transformer Engine 2.14's order of operations; OCP Microscaling 1.0.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(F32).max
E2M1, E4M3, UE8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
MAXIMUM = {E2M1: F32(6), E4M3: F32(448)}


@dataclass
class Quantized:
    """codes: uint8, one an element, with the sign of zero as in the reference; scales: stored bits,
    one a block, repeated on the rows of a tile; e: element multipliers, spread to the elements."""

    codes: np.ndarray
    scales: np.ndarray
    amax: np.float32
    values: np.ndarray  # float32, (code * scale) * tensor decode scale
    decode: np.float32
    scaled: np.ndarray  # what is rounded to the element type, before clipping
    stored: np.ndarray  # float32 values of the scales, spread to the elements

    @property
    def packed(self) -> np.ndarray:
        """Even column in the low nibble."""
        return self.codes[..., 0::2] | self.codes[..., 1::2] << 4


def grid(kind) -> np.ndarray:
    """All finite non-negative values of a small type, ascending, float64."""
    bits = ml_dtypes.finfo(kind).bits
    codes = np.arange(2 ** (bits - (kind is not UE8M0)), dtype=np.uint8)
    values = codes.view(kind).astype(np.float64)
    return values[np.isfinite(values)]


def to_neighbour(a: np.ndarray, kind, direction: str) -> np.ndarray:
    """The neighbour of non-negative `a` on the type's grid, `up` or `down`, saturating."""
    points = grid(kind)
    a = a.astype(np.float64)
    side = {"up": "left", "down": "right"}[direction]
    index = np.searchsorted(points, a, side) - (direction == "down")
    return points[np.clip(index, 0, len(points) - 1)].astype(F32)


def nearest(a: np.ndarray, kind) -> np.ndarray:
    """Nearest, ties to even, saturating: clip, then the cast of ml_dtypes; float32."""
    top = MAXIMUM[kind]
    return np.clip(a, -top, top).astype(kind).astype(F32)


def spread(per_block: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(per_block, block[0], 0), block[1], 1)


def repeated(per_block: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """As stored: a tile's scale on each of its rows, a column block's once."""
    return per_block if block[1] == 1 else np.repeat(per_block, block[0], 0)


def block_amax(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    rows, columns = block
    high, wide = x.shape
    return np.abs(x).reshape(high // rows, rows, wide // columns, columns).max((1, 3))


def with_sign(magnitude: np.ndarray, scaled: np.ndarray) -> np.ndarray:
    """A small negative that rounds to zero becomes -0; an input -0.0 becomes +0 (the reference)."""
    return np.where(scaled < 0, -magnitude, magnitude).astype(F32)


def codes_of(values: np.ndarray, kind) -> np.ndarray:
    return values.astype(kind).view(np.uint8)


def stochastic_e2m1(magnitude: np.ndarray, byte: np.ndarray) -> np.ndarray:
    """The software form: t = |x| + (byte / 256) step(|x|), down to the grid at t, at most 6."""
    a = magnitude.astype(F32)
    step = np.where(a < 2, F32(0.5), np.where(a < 4, F32(1), F32(2)))
    with np.errstate(over="ignore"):
        t = a + byte.astype(F32) / F32(256) * step
    points = grid(E2M1)
    return points[np.searchsorted(points, t.astype(np.float64), "right") - 1].astype(F32)


def tensor_scales(amax: np.float32, top: float = 448.0 * 6.0) -> tuple[np.float32, np.float32]:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        encode = np.minimum(F32(top) / F32(amax), FLT_MAX)
    if amax == 0 or encode == 0:
        encode = F32(1)
    return encode, F32(1) / encode


def wanted_scale(b: np.ndarray, encode: np.float32, order: str, target: float) -> np.ndarray:
    """The block decode scale before it is rounded to its type, by each published order."""
    six = F32(target)
    with np.errstate(over="ignore"):
        if order == "te":  # the multiplier is formed once per tensor
            return np.minimum(b * (encode * (F32(1) / six)), FLT_MAX)
        if order in ("te-2.13", "paper"):  # both divide the block's amax first
            return (b / six) * encode
    raise ValueError(order)


def nvfp4(
    x: np.ndarray,
    block: tuple[int, int] = (1, 16),
    *,
    amax: float | None = None,
    order: str = "te",
    scale_rounding: str = "nearest",
    tensor_scale: bool = True,
    target: float = 6.0,
    scale_target: float = 448.0,
    random: np.ndarray | None = None,
) -> Quantized:
    """A float32 matrix; `random` bytes (x's shape) round stochastically."""
    x = np.asarray(x, F32)
    b = block_amax(x, block)
    amax = F32(np.abs(x).max() if amax is None else amax)
    encode, decode = tensor_scales(amax, scale_target * target) if tensor_scale else (F32(1), F32(1))
    wanted = wanted_scale(b, encode, order, target)
    if scale_rounding == "nearest":
        s = nearest(wanted, E4M3)
    else:
        s = to_neighbour(np.minimum(wanted, 448), E4M3, scale_rounding)
    with np.errstate(divide="ignore", over="ignore"):
        e = np.minimum(F32(1) / (s * decode), FLT_MAX)
        scaled = x * spread(e, block)
    magnitude = np.minimum(np.abs(scaled), F32(6))
    magnitude = nearest(magnitude, E2M1) if random is None else stochastic_e2m1(magnitude, random)
    q = with_sign(magnitude, scaled)
    stored = spread(s, block)
    bits = repeated(s.astype(E4M3).view(np.uint8), block)
    return Quantized(codes_of(q, E2M1), bits, amax, (q * stored) * decode, decode, scaled, stored)


def power_of_two_scaled(x: np.ndarray, block: tuple[int, int], kind) -> Quantized:
    """MXFP4, MXFP8 and FP8 blocks: the smallest power of two that lets no element exceed the type's
    maximum (2**-126 at least), found exactly in float64; zeros fill the last blocks."""
    x = np.asarray(x, F32)
    high, wide = x.shape
    rows, columns = block
    full = np.zeros((-(-high // rows) * rows, -(-wide // columns) * columns), F32)
    full[:high, :wide] = x
    b = block_amax(full, block).astype(np.float64)
    top = np.float64(MAXIMUM[kind])
    _, exponent = np.frexp(b / top)  # b / top < 2**exponent, to a rounding
    k = np.where(np.ldexp(top, exponent - 1) >= b, exponent - 1, exponent)
    k = np.where(b == 0, -126, np.clip(k, -126, 127))
    stored = spread(np.ldexp(1.0, k), block)[:high, :wide]
    scaled = (x.astype(np.float64) / stored).astype(F32)
    q = with_sign(nearest(np.abs(scaled), kind), scaled)
    with np.errstate(over="ignore"):
        values = q * stored.astype(F32)
    bits = repeated((k + 127).astype(np.uint8), block)[:high]
    amax = F32(np.abs(x).max())
    return Quantized(codes_of(q, kind), bits, amax, values, F32(1), scaled, stored.astype(F32))


def four_over_six(x: np.ndarray, measure: str, scale_target: float = 256.0) -> Quantized:
    """Per 1 x 16 block the scale that maps its amax to 6 or the one that maps it to 4, whichever
    errs less (float64 sums); a tie takes 6. arXiv 2512.02010."""
    x = np.asarray(x, F32)
    encode, decode = tensor_scales(F32(np.abs(x).max()), scale_target * 6)
    b = block_amax(x, (1, 16))
    best = None
    for amax_of_block in (b, b * F32(1.5)):
        s = nearest(wanted_scale(amax_of_block, encode, "te", 6.0), E4M3)
        with np.errstate(divide="ignore", over="ignore"):
            scaled = x * spread(np.minimum(F32(1) / (s * decode), FLT_MAX), (1, 16))
        q = with_sign(nearest(np.abs(scaled), E2M1), scaled)
        values = (q * spread(s, (1, 16))) * decode
        error = np.abs(x.astype(np.float64) - values.astype(np.float64))
        error = error**2 if measure == "mse" else error
        error = error.reshape(-1, 16).sum(-1).reshape(b.shape)
        if best is None:
            best = error, s, q, values, scaled
            continue
        take = error < best[0]
        wide = spread(take, (1, 16))
        s, q = np.where(take, s, best[1]), np.where(wide, q, best[2])
        values, scaled = np.where(wide, values, best[3]), np.where(wide, scaled, best[4])
    bits = s.astype(E4M3).view(np.uint8)
    return Quantized(
        codes_of(q, E2M1), bits, F32(np.abs(x).max()), values, decode, scaled, spread(s, (1, 16))
    )


def hadamard_matrix(size: int = 16, mask: int = 0xD7E8) -> np.ndarray:
    """diag(signs) H / sqrt(size) in float64; entry (i, j) of H is the parity of the bits of i & j."""
    i = np.arange(size)
    parity = np.array([[bin(a & b).count("1") & 1 for b in i] for a in i])
    signs = np.array([-1.0 if mask >> (a % 16) & 1 else 1.0 for a in i])
    return signs[:, None] * (1.0 - 2.0 * parity) / np.sqrt(size)


def hadamard_bf16(x: np.ndarray, size: int = 16, mask: int = 0xD7E8) -> np.ndarray:
    """Runs of `size` along the last axis of bf16-valued `x` times the matrix, exact in float64 for
    data of ordinary range, rounded once to bf16 (by way of float32 only where that is exact)."""
    y = x.astype(np.float64).reshape(-1, size) @ hadamard_matrix(size, mask)
    return y.astype(F32).astype(ml_dtypes.bfloat16).astype(F32).reshape(x.shape)


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Where the scale (row, column) of a matrix with `columns` scales a row lies for the GEMM."""
    tile = row // 128 * -(-columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + column % 4
