"""Local fidelity: the three products of one linear under many recipes, given its exact x and dy.

What recipes share (an operand, a product) is made once: a recipe is one or two fields away from the
next, so 27 of them need about a third of their products. Each product is compared with the FP32 one
of unquantised operands. Its dy alone is judged too: against the product of the same other operand
with unquantised dy, which is the part that stochastic rounding makes unbiased. For dgrad, the gap of
the chain rule is the difference between its weights and those that fprop multiplied (arXiv
2509.25149, section 4.3), as an error of dx.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fp4repro.core.accumulate import on_fp4_units
from fp4repro.core.lost import lost
from fp4repro.core.products import product
from fp4repro.core.quantize import prepare
from fp4repro.core.random import RandomKey
from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity.moments import Errors, powers_of_two, square
from fp4repro.layers.operands import Slot
from fp4repro.recipes import SLOTS, Recipe


@dataclass(frozen=True)
class Fidelity:
    """One product of one linear under one recipe; squares relative to the exact product's."""

    error: float  # of one draw
    bias: float  # of the mean over all draws, may be below 0 by noise
    noise: float  # variance of a draw
    cosine: float
    curve: Mapping[int, float] = field(default_factory=dict)  # draws -> of the mean error
    rounding: Mapping[int, float] = field(default_factory=dict)  # the same, of dy's rounding alone
    chain_rule: float | None = None  # dgrad: of the weights' difference from fprop's


class Linear:
    """One linear with x (tokens, in), dy (tokens, out) and W (out, in); `number` keys its random bits."""

    def __init__(self, x: Tensor, dy: Tensor, weight: Tensor, number: int, draws: int, seed: int = 0) -> None:
        self.tensors = {"x": x, "dy": dy, "w": weight}
        self.draws = draws
        self._key = RandomKey(seed, layer=number)
        wide = {name: tensor.float() for name, tensor in self.tensors.items()}
        self.exact = {
            "fprop": wide["x"] @ wide["w"].T,
            "dgrad": wide["dy"] @ wide["w"],
            "wgrad": wide["dy"].T @ wide["x"],
        }
        self._made: dict[tuple, object] = {}

    def fidelity(self, name: str, recipe: Recipe) -> Fidelity | None:
        """Of the product `name`; None where a format cannot hold an operand's shape."""
        slots = tuple(Slot.of(recipe, slot) for slot in SLOTS if slot.endswith(name))
        formats = (slot.format for slot in slots)
        summed = recipe.accumulate if on_fp4_units(*formats) else "fp32"
        dtype = torch.float32 if name == "wgrad" and recipe.wgrad_dtype == "fp32" else torch.bfloat16
        settings = (name, summed, dtype)
        try:
            found = self._once(self._compare, settings, *slots)
            gap = self._chain_rule(slots[1], Slot.of(recipe, "w_fprop")) if name == "dgrad" else None
        except Fp4ReproError:
            return None
        return replace(found, chain_rule=gap)

    def losses(self, name: str, recipe: Recipe) -> Counter[str]:
        """Counts of `lost` over the operand of a slot, in its first draw; empty in BF16."""
        slot = Slot.of(recipe, name)
        if slot.format is None:
            return Counter()
        return self._once(self._lost, slot)

    def _lost(self, slot: Slot) -> Counter[str]:
        x = slot.transform(self.tensors[_tensor(slot)], self._keyed(0))
        got, _ = self._operand(slot, 0)
        return lost(prepare(x, slot.format, nonfinite="poison"), x, got)

    def _compare(self, settings: tuple, first: Slot, second: Slot) -> Fidelity:
        name = settings[0]
        exact = self.exact[name]
        whole = square(exact) or 1.0
        errors, rounding, cosines = Errors(), Errors(), []
        rounds_dy = first.format is not None and name != "fprop"
        is_random = _is_random(first) or _is_random(second)
        for draw in range(self.draws if is_random else 1):
            got = self._product(settings, first, second, draw)
            errors.add(got - exact)
            cosines.append(float((got * exact).sum() / ((square(got) or 1.0) * whole) ** 0.5))
            if rounds_dy:
                rounding.add(got - self._with_exact_dy(settings, first, second, draw))
        return Fidelity(
            error=errors.mean_square / whole,
            bias=errors.bias_square / whole,
            noise=errors.variance / whole,
            cosine=sum(cosines) / len(cosines),
            curve=self._curve(errors, whole, is_random),
            rounding=self._curve(rounding, whole, is_random),
        )

    def _curve(self, errors: Errors, whole: float, is_random: bool) -> dict[int, float]:
        """Without randomness every draw is the first one."""
        means = {n: mean / whole for n, mean in errors.means.items()}
        return means if is_random or not means else dict.fromkeys(powers_of_two(self.draws), means[1])

    def _with_exact_dy(self, settings: tuple, first: Slot, second: Slot, draw: int) -> Tensor:
        exact = replace(first, format=None, stochastic=False)
        if _is_random(exact) or _is_random(second):
            return self._product(settings, exact, second, draw)
        return self._once(self._product, settings, exact, second, 0)

    def _chain_rule(self, weight: Slot, of_fprop: Slot) -> float | None:
        """None where fprop multiplies transformed weights, which are not to be compared entry by entry."""
        if of_fprop.hadamard or weight.hadamard:
            return None
        if _identity(weight) == _identity(of_fprop):
            return 0.0
        (w, w_scale), (f, f_scale) = self._operand(weight, 0), self._operand(of_fprop, 0)
        difference = w.float() * w_scale - f.float() * f_scale
        return square(self.tensors["dy"].float() @ difference) / (square(self.exact["dgrad"]) or 1.0)

    def _product(self, settings: tuple, first: Slot, second: Slot, draw: int) -> Tensor:
        """FP32 values of a product as the quantised layer gives it."""
        name, summed, dtype = settings
        (a, a_scale), (b, b_scale) = self._operand(first, draw), self._operand(second, draw)
        sides = {"fprop": (a, b.T), "dgrad": (a, b), "wgrad": (a.T, b)}[name]
        return product(*sides, a_scale * b_scale, dtype, summed).float()

    def _operand(self, slot: Slot, draw: int) -> tuple[Tensor, Tensor | float]:
        draw = draw if _is_random(slot) else 0
        return self._once(self._quantise, slot, draw)

    def _quantise(self, slot: Slot, draw: int) -> tuple[Tensor, Tensor | float]:
        return slot.operand(self.tensors[_tensor(slot)], self._keyed(draw))

    def _keyed(self, draw: int) -> RandomKey:
        return replace(self._key, step=draw)

    def _once(self, make: Callable, *arguments: object) -> object:
        """`make(*arguments)`, kept; slots of the same effect count as one."""
        key = (make.__name__, *(_identity(a) if isinstance(a, Slot) else a for a in arguments))
        if key not in self._made:
            self._made[key] = make(*arguments)
        return self._made[key]


def _tensor(slot: Slot) -> str:
    return slot.name.split("_")[0]


def _is_random(slot: Slot) -> bool:
    return (slot.stochastic and slot.format is not None) or (slot.hadamard and slot.hadamard_signs == "drawn")


def _identity(slot: Slot) -> tuple:
    """All that decides a slot's values."""
    turned = (slot.axis, slot.hadamard_size, slot.hadamard_signs) if slot.hadamard else None
    stream = (slot.name, slot.random_bits) if _is_random(slot) else None
    return _tensor(slot), slot.format, turned, stream
