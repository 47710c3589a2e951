"""One slot of a recipe, turned into what a product multiplies.

A slot's format names its block along the contraction. Where the contraction is the rows of the matrix
at hand (tokens in wgrad, output features of W in dgrad), the same block stands upright, so no operand
is ever transposed in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4repro.core.formats import BlockFormat
from fp4repro.core.hadamard import hadamard
from fp4repro.core.quantize import Prepared, prepare
from fp4repro.core.random import RandomKey
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.recipes import SLOTS, Recipe

# Is shown every operand: the slot's name, how it was quantised, what (transformed), and what it became.
Watch = Callable[[str, Prepared, Tensor, Tensor], None]

_UPRIGHT = ("w_dgrad", "dy_wgrad", "x_wgrad")  # contraction over the rows


@dataclass(frozen=True)
class Slot:
    """One operand of one product under a recipe."""

    name: str
    format: BlockFormat | None
    stochastic: bool
    random_bits: int
    hadamard: bool
    hadamard_size: int
    hadamard_signs: str

    @classmethod
    def of(cls, recipe: Recipe, name: str) -> "Slot":
        fmt = getattr(recipe, name)
        if fmt is not None and name in _UPRIGHT:
            fmt = fmt.transposed
        return cls(
            name,
            fmt,
            name in recipe.stochastic,
            recipe.random_bits,
            name.split("_")[1] in recipe.hadamard,
            recipe.hadamard_size,
            recipe.hadamard_signs,
        )

    @property
    def role(self) -> int:
        """Number of the slot in random keys."""
        return SLOTS.index(self.name)

    @property
    def axis(self) -> int:
        """The contraction's axis in the matrix at hand."""
        return 0 if self.name in _UPRIGHT else 1

    def transform(self, x: Tensor, key: RandomKey) -> Tensor:
        """The Hadamard transform of BF16 values along the contraction, where the recipe has it."""
        if not self.hadamard:
            return x
        # Both operands of a product must draw the same signs: the key knows the product, not the slot.
        drawn = replace(key, role=100 + self.axis_role, salt=0) if self.hadamard_signs == "drawn" else None
        return hadamard(x, self.hadamard_size, self.hadamard_signs, drawn, self.axis, dtype=torch.bfloat16)

    @property
    def axis_role(self) -> int:
        return SLOTS.index(self.name) // 2

    def operand(self, x: Tensor, key: RandomKey, watch: Watch | None = None) -> tuple[Tensor, Tensor | float]:
        """x (rows, columns) -> BF16 (or FP32) values to multiply and the factor of the product."""
        x = self.transform(x, key)
        if self.format is None:
            return x.to(torch.bfloat16), 1.0
        prepared = prepare(x, self.format, nonfinite="poison")
        kind = "operand" if self.format.exact_in_bf16 else "fake"
        if kind == "fake":  # scales that BF16 cannot hold: FP32 values, tensor scale included
            prepared = replace(prepared, matrix=prepared.matrix.float())
        values = prepared.apply(kind, self._rounding, self._keyed(prepared.amax, key), self.random_bits)
        values = prepared.blocks.restore(values)
        if watch is not None:
            watch(self.name, prepared, x, values)
        return values, prepared.decode if kind == "operand" else 1.0

    def store(self, x: Tensor, key: RandomKey, watch: Watch | None = None) -> Tensor | QuantizedTensor:
        """x as it is kept for a later product: packed where the slot quantises."""
        x = self.transform(x, key)
        if self.format is None:
            return x
        prepared = prepare(x, self.format, nonfinite="poison")
        kept = prepared.store(self._rounding, self._keyed(prepared.amax, key), self.random_bits)
        if watch is not None:
            watch(self.name, prepared, x, self.load(kept)[0])
        return kept

    @staticmethod
    def load(kept: Tensor | QuantizedTensor) -> tuple[Tensor, Tensor | float]:
        """The inverse of `store`: values to multiply and the factor."""
        if isinstance(kept, Tensor):
            return kept.to(torch.bfloat16), 1.0
        if kept.format.exact_in_bf16:
            return kept.operand(), kept.tensor_scale
        return kept.dequantize(torch.float32), 1.0

    @property
    def _rounding(self) -> str:
        return "stochastic" if self.stochastic else "nearest"

    def _keyed(self, amax: Tensor, key: RandomKey) -> RandomKey | None:
        """The slot's own stream. The amax is part of its key, beside what the key's use has put there,
        so that two uses of a layer in one step, or steps that nobody counts, do not share their bits;
        recomputed data draws the same again."""
        if not self.stochastic:
            return None
        return replace(key, role=self.role, salt=key.salt << 32 | amax_bits(amax))


def amax_bits(amax: Tensor) -> int:
    """The bits of an FP32 amax, which is not negative, as an integer of 31 bits."""
    return int(amax.view(torch.int32))
