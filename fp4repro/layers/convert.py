"""Putting a recipe into a model: every `nn.Linear` of its blocks becomes a `QuantLinear`.

A layer is changed in place, class and all, so parameters, names, ties, hooks and `state_dict` stay as
they are. Blocks are the entries of the model's longest list of modules; the rule for the layers that
stay in BF16 counts them. Linears outside it (the output head, mainly) stay, as do shapes that the
formats cannot hold, each with its reason.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from fp4repro.errors import Fp4ReproError
from fp4repro.layers.linear import Clock, Plan, QuantLinear
from fp4repro.recipes import Recipe

_INDEXED = re.compile(r"^((?:.*?\.)??)(\d+)(?:\.|$)")


@dataclass
class Conversion:
    """What `convert` did: `swapped` name -> shape, `kept` name -> why it stayed."""

    recipe: Recipe
    swapped: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict, repr=False)

    def calls(self) -> dict[str, int]:
        """Operands quantised so far, by slot, over all layers."""
        total = Counter()
        for plan in self.plans.values():
            total.update(plan.calls)
        return dict(total)

    def __str__(self) -> str:
        lines = [f"{name}: {self.recipe.name} {shape}" for name, shape in self.swapped.items()]
        return "\n".join(lines + [f"{name}: BF16, {why}" for name, why in self.kept.items()])


def convert(model: nn.Module, recipe: Recipe, seed: int = 0) -> Conversion:
    """Change the linears of `model` in place by the recipe's layer rule.

    `seed` keys stochastic rounding, together with `set_step`. Converting again replaces the recipe.
    Raises if the model has no `nn.Linear`.
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise Fp4ReproError(
            f"{type(model).__name__} has no nn.Linear to convert: its layers may be of another class"
        )
    report = Conversion(recipe)
    clock = Clock(seed)
    prefix, count = _blocks(linears)
    stay = recipe.keep.blocks(count)
    for index, (name, layer) in enumerate(linears.items()):
        reason = _reason_to_keep(name, layer, recipe, prefix, count, stay)
        if reason:
            report.kept[name] = reason
            if type(layer) is QuantLinear:
                layer.__class__ = nn.Linear
            continue
        layer.__class__ = QuantLinear
        layer.__dict__.pop("_quantised", None)
        layer.plan = Plan(recipe, clock, index)
        report.swapped[name] = (layer.out_features, layer.in_features)
        report.plans[name] = layer.plan
    return report


def set_step(model: nn.Module, step: int, microbatch: int = 0) -> None:
    """Key the random bits of what follows by step and microbatch. A run that calls it before each
    forward can be resumed at any step with the same bits."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.plan.clock.step = step
            module.plan.clock.microbatch = microbatch


def _blocks(linears: dict[str, nn.Linear]) -> tuple[str | None, int]:
    """Name prefix of the list of blocks that holds most linears, and the number of its entries."""
    found: Counter = Counter()
    entries: dict[str, set[int]] = {}
    for name in linears:
        if match := _INDEXED.match(name):
            prefix, index = match.group(1), int(match.group(2))
            found[prefix] += 1
            entries.setdefault(prefix, set()).add(index)
    if not found:
        return None, 0
    prefix = found.most_common(1)[0][0]
    return prefix, max(entries[prefix]) + 1


def _reason_to_keep(
    name: str, layer: nn.Linear, recipe: Recipe, prefix: str | None, count: int, stay: set[int]
) -> str | None:
    if not recipe.quantises:
        return f"recipe {recipe.name} quantises nothing"
    if type(layer) not in (nn.Linear, QuantLinear):
        return f"a subclass of nn.Linear ({type(layer).__name__}) with a forward of its own"
    if recipe.keep.by_name(name):
        return "named by the recipe's rule"
    if prefix is not None:
        match = _INDEXED.match(name)
        if not match or match.group(1) != prefix:
            return "outside the blocks (output head, embedding or projection between)"
        if int(match.group(2)) in stay:
            return f"block {match.group(2)} of {count}, kept by the recipe's rule"
    return _misfit(layer, recipe)


def _misfit(layer: nn.Linear, recipe: Recipe) -> str | None:
    """Why the formats cannot hold the layer's operands, if they cannot."""
    sides = {
        "in_features": (layer.in_features, ("x_fprop", "w_fprop")),
        "out_features": (layer.out_features, ("dy_dgrad", "w_dgrad")),
    }
    for what, (side, slots) in sides.items():
        for slot in slots:
            fmt = getattr(recipe, slot)
            if fmt is not None and not fmt.pads and fmt.block[1] and side % fmt.block[1]:
                return f"{what} {side} is not a multiple of {fmt.block[1]}, the block of {fmt.name}"
    if recipe.w_fprop is not None and layer.in_features % 2:
        return f"in_features {layer.in_features} is odd"
    return None
