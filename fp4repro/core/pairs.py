"""E2M1 in upright blocks, two columns at a time, a quarter to a half of the time of one at a time.

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


def make_apply_pairs(fmt: BlockFormat, output: str, bits: int) -> Callable[..., Tensor]:
    """As `kernels.make_apply` of BF16 pairs: "operand" gives pairs of BF16, "codes" packed bytes.
    `random`: int16, whose bytes are the two columns' 8 bits."""

    @by_rows
    def apply_pairs(
        x: Tensor, s_even: Tensor, s_odd: Tensor, e_even: Tensor, e_odd: Tensor, random: Tensor | None
    ) -> Tensor:
        bytes_ = (None, None) if random is None else (random & 0xFF, random >> 8 & 0xFF)
        even = rounded((x << 16).view(torch.float32), e_even, bytes_[0], fmt, bits, True)
        odd = rounded((x & UPPER).view(torch.float32), e_odd, bytes_[1], fmt, bits, True)
        if output == "codes":
            low, high = (encode_elements(a, n, fmt.element, True) for a, n in (even, odd))
            return low | high << 4
        low, high = (torch.where(n, -a, a) * s for (a, n), s in ((even, s_even), (odd, s_odd)))
        return low.view(torch.int32) >> 16 & 0xFFFF | high.view(torch.int32) & UPPER

    return apply_pairs


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
