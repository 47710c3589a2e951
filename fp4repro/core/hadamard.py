"""The blockwise random Hadamard transform, x' = x diag(signs) H / sqrt(d) on runs of d elements.

H is Sylvester's symmetric +-1 matrix, so the transform is orthogonal: applied to both operands of a
product along its contraction it cancels (arXiv 2509.25149, section 4.2). Transformer Engine fixes
d = 16 and one sign vector for all layers and steps; its matrix is exact in BF16, sums are FP32, and
the result is rounded to BF16 before any amax is taken. Along rows the transform is a product with the
matrix; along columns, as wgrad needs it, sums and differences of whole rows in log2(d) stages.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fp4repro.core.compiled import compiled
from fp4repro.core.random import RandomKey, random_bits
from fp4repro.errors import Fp4ReproError

Signs = Literal["te", "none", "drawn"]

TE_SIGN_MASK = 0xD7E8  # bit i is set where sign i is -1
SIZES = (2, 4, 8, 16, 32, 64, 128)
LARGEST_IN_STAGES = 16  # beyond, compiling d unrolled rows takes longer than a short run saves


@lru_cache(maxsize=64)
def sign_vector(size: int, signs: Signs = "te", key: RandomKey | None = None) -> Tensor:
    """The +-1 signs as float32 (size,): "te" the fixed vector (its first signs, repeated beyond 16),
    "none" all +1, "drawn" a fair draw from `key`. The returned tensor is shared: do not write to it."""
    if size not in SIZES:
        raise Fp4ReproError(f"Hadamard size {size} must be one of {', '.join(map(str, SIZES))}")
    if signs not in ("te", "none", "drawn"):
        raise Fp4ReproError(f"Hadamard signs {signs!r} must be te, none or drawn")
    if signs == "drawn" and key is None:
        raise Fp4ReproError("Hadamard signs 'drawn' need a RandomKey: pass key=RandomKey(seed=...)")
    if signs == "te":
        negative = torch.tensor([TE_SIGN_MASK >> (i % 16) & 1 for i in range(size)])
    elif signs == "drawn":
        negative = random_bits(size, key).to(torch.int32) & 1
    else:
        negative = torch.zeros(size)
    return 1.0 - 2.0 * negative.float()


@lru_cache(maxsize=64)
def hadamard_matrix(size: int, signs: Signs = "te", key: RandomKey | None = None) -> Tensor:
    """diag(signs) H / sqrt(size) as float32 (size, size); a row vector times it is the transform.
    The returned tensor is shared: do not write to it."""
    vector = sign_vector(size, signs, key)
    h = torch.ones(1, 1)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return vector[:, None] * h * size**-0.5


def make_stages(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The transform along the middle axis of (runs, size, rest), in FP32, rounded to x's type."""

    def stages(x: Tensor, signs: Tensor) -> Tensor:
        rows = [x[:, i].float() * signs[i] for i in range(size)]  # each (runs, rest)
        half = 1
        while half < size:
            for start in range(0, size, 2 * half):
                for i in range(start, start + half):
                    rows[i], rows[i + half] = rows[i] + rows[i + half], rows[i] - rows[i + half]
            half *= 2
        return torch.stack([(row * size**-0.5).to(x.dtype) for row in rows], 1)

    return stages


def hadamard(
    x: Tensor,
    size: int = 16,
    signs: Signs = "te",
    key: RandomKey | None = None,
    axis: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Transform runs of `size` elements of `x` along `axis`; same shape.

    dtype   type that values have before and after, x's own by default. BF16 gives Transformer
            Engine's values: FP32 sums of BF16 values, rounded once to BF16.

    Raises if the axis is not a multiple of `size`.
    """
    if not x.is_floating_point():
        raise Fp4ReproError(f"only floating-point tensors can be transformed, got {x.dtype}")
    if not -x.dim() <= axis < x.dim():
        raise Fp4ReproError(f"axis {axis} is not one of a tensor of shape {tuple(x.shape)}")
    axis %= x.dim()
    vector = sign_vector(size, signs, key).to(x.device)
    if x.shape[axis] % size:
        raise Fp4ReproError(
            f"Hadamard transform of {size} needs axis {axis} of shape {tuple(x.shape)} to be a "
            f"multiple of {size}: pad it or choose a smaller size"
        )
    dtype = dtype or x.dtype
    if axis == x.dim() - 1:
        matrix = hadamard_matrix(size, signs, key).to(x.device, dtype)
        return (x.to(dtype).reshape(-1, size) @ matrix).view(x.shape)  # (runs, size)
    runs = x.reshape(-1, size, *x.shape[axis + 1 :]).flatten(2)  # (runs, size, rest)
    differentiable = x.requires_grad and torch.is_grad_enabled()
    if size <= LARGEST_IN_STAGES and dtype in (torch.bfloat16, torch.float32) and not differentiable:
        # Cast beforehand: inductor would take a cast to BF16 and back within a kernel for nothing.
        turned = compiled(make_stages, size)(runs.to(dtype).contiguous(), vector)
        return turned.view(x.shape)
    matrix = hadamard_matrix(size, signs, key).to(x.device, dtype)
    return torch.matmul(matrix.T, runs.to(dtype)).view(x.shape)
