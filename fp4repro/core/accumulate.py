"""Sums of FP4 products as Blackwell's tensor cores form them, which is not how FP32 adds.

Probes of a GB200 (arXiv 2609.02846) are matched by: products in groups of 64 along the contraction,
each group summed to one FP32 number (nearest even), the groups added in order in FP32, rounding
towards zero. Sums so lose magnitude, which FP32's do not; where block scales are alike, as on normal
data, sums need no rounding and both agree to the bit. That study also rounds the result to multiples
of 1/1024, which its probes do not single out: left out here.

A group's sum is formed in FP64. NVFP4's products are multiples of 2**-20 below 2**23, so 64 of them
fit 49 bits and the one rounding to FP32 is exact; other formats may round twice, one time in 2**29.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fp4repro.core.compiled import compiled
from fp4repro.core.formats import E2M1, BlockFormat
from fp4repro.errors import Fp4ReproError

Accumulate = Literal["fp32", "blackwell"]
ACCUMULATE = ("fp32", "blackwell")

GROUP = 64
# Outputs are worked on in square tiles of this side: what bounds memory, and on a CPU stays in cache.
_CPU_TILE, _GPU_TILE = 512, 4096


def check_accumulate(accumulate: str) -> None:
    """Refuse an unknown way of summing."""
    if accumulate not in ACCUMULATE:
        raise Fp4ReproError(f"accumulate {accumulate!r} must be {' or '.join(ACCUMULATE)}")


def on_fp4_units(*formats: BlockFormat | None) -> bool:
    """Whether operands in these formats are multiplied by FP4 units; None is a BF16 operand."""
    return all(f is not None and f.element is E2M1 and f.exact_in_bf16 for f in formats)


def grouped_product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) @ b (K, N), summed as the module says: float32 (M, N). Any strides, any K."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    side = _CPU_TILE if a.device.type == "cpu" else _GPU_TILE
    for top in range(0, out.shape[0], side):
        for left in range(0, out.shape[1], side):
            tile = _sum_groups(a[top : top + side], b[:, left : left + side])
            out[top : top + side, left : left + side] = tile
    return out


def _sum_groups(a: Tensor, b: Tensor) -> Tensor:
    shape = a.shape[0], b.shape[1]
    total = torch.zeros(shape, dtype=torch.float32, device=a.device).view(-1)
    for k in range(0, a.shape[1], GROUP):
        group = a[:, k : k + GROUP].double() @ b[k : k + GROUP].double()
        total = compiled(_make_add)(total, group.view(-1))
    return total.view(shape)


def _make_add() -> Callable[[Tensor, Tensor], Tensor]:
    def add(total: Tensor, group: Tensor) -> Tensor:
        return add_toward_zero(total, group.float())

    return add


def add_toward_zero(a: Tensor, b: Tensor) -> Tensor:
    """a + b in float32, rounded towards zero, exactly, for sums below FP32's maximum.

    The addition's own rounding error is an FP32 number, which six additions recover (Knuth's
    TwoSum), however far apart the exponents. Where it points back to zero, the sum went past the
    exact one and the neighbour on zero's side is the answer.
    """
    rounded = a + b
    of_b = rounded - a
    error = (a - (rounded - of_b)) + (b - of_b)
    past = torch.where(rounded > 0, error < 0, error > 0)
    return torch.where(past, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
