"""Rounding non-negative FP32 magnitudes to a small float's grid, exactly, by FP32 arithmetic alone.

Nearest, ties to even: in the binade 2**e the grid's spacing is 2**(e-m); adding and subtracting a
power of two whose own FP32 spacing is that leaves the rounding to the adder. Stochastic: with n
random bits r, t = a + r / 2**n * spacing, then down to the grid at t; this is the software rounder
of Transformer Engine and what `cvt.rs` does with its 8 bits, cut towards zero by at most
spacing / 256. Callers clamp to the format's maximum before; nothing here saturates.

E2M1 has three binades, which can also be told apart by comparisons (`compare`). Both ways give the
same bits; inductor vectorises integer views of FP32 over 16 lanes, but not over longer rows.
"""

import math

import torch
from torch import Tensor

from fp4repro.core.formats import E2M1, FP32, Minifloat

EXPONENT = 0x7F800000  # exponent field of an FP32
_MOST_BITS = 20


def _binade(a: Tensor, fmt: Minifloat, times: float, compare: bool) -> Tensor:
    """`times` (a power of two) times max(2**floor(log2 a), smallest normal), elementwise."""
    if compare and fmt is E2M1:
        return torch.where(a < 2.0, times, torch.where(a < 4.0, 2.0 * times, 4.0 * times))
    field = (a.view(torch.int32) & EXPONENT).clamp_min_(fmt.emin + 127 << 23)
    return field.add_(int(math.log2(times)) << 23).view(torch.float32)


def _floor(t: Tensor, fmt: Minifloat, compare: bool) -> Tensor:
    """Down to the grid (towards zero)."""
    if compare and fmt is E2M1:
        coarse = torch.where(t < 4.0, torch.floor(t), torch.floor(t * 0.5) * 2.0)
        return torch.where(t < 2.0, torch.floor(t * 2.0) * 0.5, coarse)
    kept = -(1 << (23 - fmt.mantissa_bits))  # mask of sign, exponent and the format's mantissa
    normal = (t.view(torch.int32) & kept).view(torch.float32)
    subnormal = torch.floor(t * (1.0 / fmt.min_step)) * fmt.min_step
    return torch.where(t < fmt.min_normal, subnormal, normal)


def round_nearest(a: Tensor, fmt: Minifloat, compare: bool = False) -> Tensor:
    """Nearest value of `fmt`'s grid, ties to the even code; between powers of two ties go up."""
    if fmt is FP32:
        return a
    if fmt.mantissa_bits == 0:  # powers of two: the adder's trick would overflow near 2**127
        return _power_of_two(a, 0x400000, fmt)
    c = _binade(a, fmt, 2.0 ** (23 - fmt.mantissa_bits), compare)
    return (a + c).sub_(c)


def round_down(a: Tensor, fmt: Minifloat) -> Tensor:
    """Largest value of the grid that is not above `a`."""
    if fmt is FP32:
        return a
    return _floor(a, fmt, False) if fmt.mantissa_bits else _power_of_two(a, 0, fmt)


def round_up(a: Tensor, fmt: Minifloat) -> Tensor:
    """Smallest value of the grid that is not below `a`."""
    if fmt is FP32:
        return a
    if fmt.mantissa_bits == 0:
        return _power_of_two(a, 0x7FFFFF, fmt)
    down = _floor(a, fmt, False)
    return torch.where(down < a, down + _binade(down, fmt, 2.0**-fmt.mantissa_bits, False), down)


def nearest_bf16(x: Tensor) -> Tensor:
    """float32 `x` rounded to values that BF16 holds, ties to even. On the bits, not by a cast there and back:
    a compiler that fuses both leaves them out."""
    bits = x.view(torch.int32)
    nearest = bits + 0x7FFF + (bits >> 16 & 1) & -0x10000
    return torch.where(x == x, nearest.view(torch.float32), x)  # a NaN's bits might carry over


def _power_of_two(a: Tensor, carry: int, fmt: Minifloat) -> Tensor:
    """Power of two above `a` if adding `carry` to its mantissa overflows, else the one below."""
    field = (a.view(torch.int32) + carry) & EXPONENT
    return field.view(torch.float32).clamp(fmt.min_normal, fmt.max)


ROUND = {"nearest": round_nearest, "up": round_up, "down": round_down}


def round_stochastic(
    a: Tensor, fmt: Minifloat, random: Tensor, bits: int = 8, compare: bool = False
) -> Tensor:
    """Down or up to a neighbour, up with the fraction's probability cut to a multiple of 2**-bits.

    `random` holds integers in [0, 2**bits), one an element. Values of the grid stay as they are; to that
    end only the upper 20 of 32 bits are used, as many as FP32 adds to any value of a grid exactly.
    """
    if bits > _MOST_BITS:
        random = random.view(torch.int32) >> bits - _MOST_BITS & (1 << _MOST_BITS) - 1
        bits = _MOST_BITS
    fraction = random.to(torch.float32) * 2.0**-bits
    spacing = _binade(a, fmt, 2.0**-fmt.mantissa_bits, compare)
    return _floor(a + fraction * spacing, fmt, compare)
