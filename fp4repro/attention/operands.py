"""What each of attention's products multiplies: a tensor quantised along the contraction, or in BF16.

Q, K and V are kept once for both passes, packed where the recipe stores a view. An operand is a pair:
values, which BF16 holds, and the factor that belongs to them (`core.products`).
A view's blocks run along head_dim, which is the contraction of Q K^T and dO V^T only; a lowered
product over keys or queries takes the view's values, or quantises these again along its own axis.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4repro.core.quantize import quantize, quantize_operand
from fp4repro.core.random import RandomKey
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.recipes.attention import AttentionRecipe

Operand = tuple[Tensor, Tensor | float]

HEAD_DIM, SEQUENCE = 1, 0  # the contraction's axis in a matrix (positions, head_dim)


@dataclass(frozen=True)
class Kept:
    """One of Q, K, V or dO for the time between: heads first, positions padded to whole blocks."""

    data: Tensor | QuantizedTensor
    amax: Tensor

    @classmethod
    def of(cls, x: Tensor, recipe: AttentionRecipe, view: bool) -> "Kept":
        if view:
            packed = quantize(x, recipe.format, nonfinite="poison")
            return cls(packed, _finite(packed.amax))
        return cls(x, _finite(x.abs().amax().float()))

    def operand(self, recipe: AttentionRecipe, lowered: bool, axis: int, heads: slice) -> Operand:
        """The operand of a product over `axis`, for some heads."""
        data = _heads_of(self.data, heads)
        if isinstance(data, QuantizedTensor):
            if axis == HEAD_DIM or not lowered or recipe.reuse == "values":
                return data.operand(), data.tensor_scale
            data = data.dequantize(torch.float32)
        return operand(data, recipe, lowered, axis, amax=self.amax)

    def operands(
        self, recipe: AttentionRecipe, lowered: tuple[bool, bool], heads: slice
    ) -> tuple[Operand, Operand]:
        """Those of a product over head_dim and of one over positions, made once where they are alike."""
        first = self.operand(recipe, lowered[0], HEAD_DIM, heads)
        view = isinstance(self.data, QuantizedTensor)
        if (not lowered[1] and (view or not lowered[0])) or (view and recipe.reuse == "values"):
            return first, first
        return first, self.operand(recipe, lowered[1], SEQUENCE, heads)

    def save(self) -> tuple[tuple[Tensor, ...], tuple | None]:
        """Tensors for autograd to save, and what else `load` needs."""
        if isinstance(self.data, QuantizedTensor):
            x = self.data
            return (x.codes, x.scales, x.amax), (x.format, x.shape, x.tensor_scale)
        return (self.data, self.amax), None

    @classmethod
    def load(cls, saved: list[Tensor], about: tuple | None) -> "Kept":
        """The inverse of `save`; takes its tensors off the front of the list."""
        if about is None:
            return cls(saved.pop(0), saved.pop(0))
        fmt, shape, scale = about
        packed = QuantizedTensor(saved.pop(0), saved.pop(0), saved.pop(0), fmt, shape)
        return cls(packed.with_tensor_scale(scale), _finite(packed.amax))


def _finite(amax: Tensor) -> Tensor:
    """An amax to scale parts of a tensor by. What is not finite in a part poisons that part by itself."""
    return amax.nan_to_num(0, 0, 0)


def _heads_of(data: Tensor | QuantizedTensor, heads: slice) -> Tensor | QuantizedTensor:
    if isinstance(data, Tensor):
        return data[heads]
    codes, scales = data.codes[heads], data.scales.view(torch.uint8)[heads].view(data.scales.dtype)
    shape = torch.Size((codes.shape[0], *data.shape[1:]))
    part = QuantizedTensor(codes, scales, data.amax, data.format, shape)
    return part.with_tensor_scale(data.tensor_scale)


def operand(
    x: Tensor,
    recipe: AttentionRecipe,
    lowered: bool,
    axis: int,
    amax: Tensor | None = None,
    key: RandomKey | None = None,
) -> Operand:
    """x (heads, ..., rows, columns), quantised in blocks along its rows' axis (0) or its columns' (1),
    or in high precision; stochastically where there is a key."""
    if not lowered:
        return (x.bfloat16() if recipe.high == "bf16" else x), 1.0
    return quantize_operand(
        x.float(),
        recipe.format if axis == HEAD_DIM else recipe.upright,
        "nearest" if key is None else "stochastic",
        key,
        random_bits=recipe.random_bits,
        nonfinite="poison",
        amax=amax,
    )


def product(
    a: Operand, b: Operand, sums: torch.dtype, factor: float = 1.0, add_to: Tensor | None = None
) -> Tensor:
    """a (heads, M, K) @ b (heads, K, N), summed in `sums`, times both factors and `factor`; added to
    `add_to` in place if given. What BF16 holds is exact in `sums`."""
    left, right = a[0].to(sums), b[0].to(sums)
    scale = a[1] * b[1] * factor
    if left.device.type == "cpu":
        out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
        torch.baddbmm(out, left, right, beta=0, alpha=float(scale), out=out)
    else:
        out = torch.bmm(left, right).mul_(scale)
    # Not by the product itself: into a part of a tensor torch multiplies head by head.
    return out if add_to is None else add_to.add_(out)
