"""E2M1 in upright blocks, two columns at a time, which stores them in less time than one at a time.

In long rows inductor converts BF16 and bytes to FP32 lane by lane. Two neighbouring BF16 values seen as
one int32 need no conversion, since a BF16 is the upper half of an FP32: a shift and a mask take them
apart and put them together again. Two codes likewise leave as the byte that is stored. Same arithmetic as
`kernels`, in views (R / r, r, C / 2) with the scales (R / r, 1, C / 2) of even and of odd columns apart.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fp4repro.core.compiled import by_rows
from fp4repro.core.formats import BlockFormat
from fp4repro.core.kernels import encode_elements, rounded

UPPER = -0x10000  # mask of the upper half of an int32


def halves(s: Tensor) -> tuple[Tensor, Tensor]:
    """Of even and of odd columns, each contiguous."""
    return s[..., 0::2].contiguous(), s[..., 1::2].contiguous()


def make_codes_of_pairs(fmt: BlockFormat) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """BF16 pairs -> their codes, rounded to nearest, packed. Stochastic rounding stays with `kernels`:
    the random bytes of a pair cost more to take apart than the pair saves."""

    @by_rows
    def codes_of_pairs(x: Tensor, e_even: Tensor, e_odd: Tensor) -> Tensor:
        even = rounded((x << 16).view(torch.float32), e_even, None, fmt, 0, True)
        odd = rounded((x & UPPER).view(torch.float32), e_odd, None, fmt, 0, True)
        low, high = (encode_elements(a, y < 0, fmt.element, True) for a, y in (even, odd))
        return low | high << 4

    return codes_of_pairs


def make_decode_pairs() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Packed codes -> code times scale as pairs of BF16."""

    def half(code: Tensor, s: Tensor) -> Tensor:
        c = (code & 7).to(torch.float32)
        a = torch.maximum(torch.maximum(c * 0.5, c - 2.0), c * 2.0 - 8.0)  # 0 to 3, 4 and 5, 6 and 7
        return (a * s).view(torch.int32) | (code & 8) << 28

    @by_rows
    def decode(packed: Tensor, s_even: Tensor, s_odd: Tensor) -> Tensor:
        word = packed.to(torch.int32)
        return half(word & 15, s_even) >> 16 & 0xFFFF | half(word >> 4, s_odd) & UPPER

    return decode
