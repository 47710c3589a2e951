"""Putting a recipe into a model: every `nn.Linear` of its blocks becomes a `QuantLinear`.

A layer is changed in place, class and all, so parameters, names, ties, hooks and `state_dict` stay as
they are. Blocks are the entries of a list of modules none of which holds more than half of its linears;
the rule for the layers that stay in BF16 counts each list (an encoder's, a decoder's) by itself.
Linears outside them (the output head, mainly) stay, as do shapes that the formats cannot hold, each
with its reason.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from fp4repro.attention.module import AttentionPlan, convert_attention
from fp4repro.errors import Fp4ReproError
from fp4repro.layers.linear import Clock, Plan
from fp4repro.layers.side_path import CLASSES, check_side_path, class_for
from fp4repro.recipes import Recipe

_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass
class Conversion:
    """What `convert` did: `swapped` name -> shape, `kept` name -> why it stayed, and `attention`, the
    names of the attention modules that take the recipe's attention."""

    recipe: Recipe
    swapped: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict, repr=False)
    attention: list[str] = field(default_factory=list)

    def calls(self) -> dict[str, int]:
        """Operands quantised so far, by slot, over all layers."""
        total = Counter()
        for plan in self.plans.values():
            total.update(plan.calls)
        return dict(total)

    def __str__(self) -> str:
        lines = [f"{name}: {self.recipe.name} {shape}" for name, shape in self.swapped.items()]
        lines += [f"{name}: {self.recipe.name} attention" for name in self.attention]
        return "\n".join(lines + [f"{name}: BF16, {why}" for name, why in self.kept.items()])


def convert(model: nn.Module, recipe: Recipe, seed: int = 0) -> Conversion:
    """Change the linears of `model` in place by the recipe's layer rule.

    `seed` keys stochastic rounding, together with `set_step`. Converting again replaces the recipe.
    Raises if the model has no `nn.Linear`.
    """
    if not isinstance(recipe, Recipe):
        raise Fp4ReproError(f"convert takes a recipe such as fp4repro.recipe('nvfp4'), got {recipe!r}")
    _check_count("seed", seed)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise Fp4ReproError(
            f"{type(model).__name__} has no nn.Linear to convert: its layers may be of another class"
        )
    report = Conversion(recipe)
    clock = Clock(seed)
    lists = _lists_of_blocks(linears)
    bypassed = _read_by_torch_itself(model)
    reasons = {n: bypassed.get(n) or _reason_to_keep(n, m, recipe, lists) for n, m in linears.items()}
    report.kept = {name: reason for name, reason in reasons.items() if reason}
    swapped = {name: layer for name, layer in linears.items() if not reasons[name]}
    check_side_path(model, swapped, recipe)  # before any layer is changed
    for layer in linears.values():
        if type(layer) in CLASSES:
            layer.detach()
            layer.__class__ = nn.Linear
    for index, (name, layer) in enumerate(linears.items()):
        if name not in swapped:
            continue
        layer.__class__ = class_for(recipe)
        layer.attach(Plan(recipe, clock, index))
        report.swapped[name] = (layer.out_features, layer.in_features)
        report.plans[name] = layer.plan
    report.attention = convert_attention(model, recipe.attention, clock)
    return report


def set_step(model: nn.Module, step: int, microbatch: int = 0) -> None:
    """Key the random bits of what follows by step and microbatch. A run that calls it before each
    forward can be resumed at any step with the same bits. Does nothing to a model without converted
    layers, which has no random bits."""
    if not isinstance(model, nn.Module):
        raise Fp4ReproError(f"set_step takes the converted model, got {type(model).__name__}")
    _check_count("step", step)
    _check_count("microbatch", microbatch)
    for module in model.modules():
        plan = module.__dict__.get("plan")
        if isinstance(plan, Plan | AttentionPlan):
            plan.clock.step = step
            plan.clock.microbatch = microbatch


def blocks_of(model: nn.Module) -> dict[str, int]:
    """Name of each linear in the blocks of a model -> index of its block, as the layer rule counts."""
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    lists = _lists_of_blocks(linears)
    found = {name: _block(name, lists) for name in linears}
    return {name: block[1] for name, block in found.items() if block is not None}


def _check_count(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise Fp4ReproError(f"{what} must be an integer from 0 up, got {value!r}")


def _positions(name: str) -> list[tuple[str, int]]:
    """(prefix of the list, index) for each list that a name lies in, outermost first."""
    return [(name[: match.start(1)], int(match.group(1))) for match in _INDEX.finditer(name)]


def _lists_of_blocks(linears: dict[str, nn.Linear]) -> dict[str, int]:
    """Prefix of each list of blocks -> number of its entries."""
    shares: dict[str, Counter] = {}
    for name in linears:
        for prefix, index in _positions(name):
            shares.setdefault(prefix, Counter())[index] += 1
    # Where one entry holds most of the linears (a model beside its head), the list is no list of blocks.
    blocks = {p: max(c) + 1 for p, c in shares.items() if 2 * max(c.values()) <= c.total()}
    # A list of one entry is, where it holds no list of more: the blocks of a model with one block.
    alone = {p: 1 for p, c in shares.items() if len(c) == 1 and not any(b.startswith(p) for b in blocks)}
    return blocks | alone


def _block(name: str, lists: dict[str, int]) -> tuple[str, int] | None:
    """The list of blocks that a linear lies in, and its index there."""
    return next(((p, i) for p, i in _positions(name) if p in lists), None)


def _read_by_torch_itself(model: nn.Module) -> dict[str, str]:
    """Linears whose weights a parent hands to a fused kernel, past their own forward."""
    return {
        f"{name}.{child}".lstrip("."): "read by nn.TransformerEncoderLayer's fused path, not called"
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        for child, _ in module.named_modules()
    }


def _reason_to_keep(name: str, layer: nn.Linear, recipe: Recipe, lists: dict[str, int]) -> str | None:
    if not recipe.quantises:
        return f"recipe {recipe.name} quantises nothing"
    if type(layer) not in (nn.Linear, *CLASSES):
        return f"a subclass of nn.Linear ({type(layer).__name__}) with a forward of its own"
    if recipe.keep.by_name(name):
        return "named by the recipe's rule"
    block = _block(name, lists)
    if block is None and lists:
        return "outside the blocks (output head, embedding or projection between)"
    if block is not None and block[1] in recipe.keep.blocks(lists[block[0]]):
        return f"block {block[1]} of {lists[block[0]]}, kept by the recipe's rule"
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
