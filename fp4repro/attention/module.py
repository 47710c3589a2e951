"""Putting `fp4_attention` in the place of a model's own, in two kinds of models.

A module that mixes q, k and v and nothing else says so by a class attribute `mixes = "attention"`, as
the hybrid's does; it is replaced. A Hugging Face model looks its attention up by name: ours is
registered there, and each of its attention modules gets a plan to be found by (`huggingface`).
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from fp4repro.attention import huggingface
from fp4repro.attention.attend import fp4_attention
from fp4repro.core.random import RandomKey
from fp4repro.recipes import AttentionRecipe

MIXES = "attention"


class Clock(Protocol):
    """Seed, step and microbatch, shared by all layers of a converted model."""

    seed: int
    step: int
    microbatch: int


@dataclass
class AttentionPlan:
    """One attention module's part in a converted model; `layer` counts them."""

    recipe: AttentionRecipe
    clock: Clock
    layer: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Tensor:
        clock = self.clock
        key = RandomKey(clock.seed, clock.step, self.layer, microbatch=clock.microbatch)
        return fp4_attention(q, k, v, self.recipe, causal, key, scale=scale)


class Fp4CausalAttention(nn.Module):
    """Stands for the module `replaced`: q, k, v (batch, heads, length, head_dim) -> like q."""

    mixes = MIXES

    def __init__(self, replaced: nn.Module, plan: AttentionPlan) -> None:
        super().__init__()
        self.__dict__["replaced"] = replaced  # past nn.Module: it is no part of the model
        self.plan = plan

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.plan.attend(q, k, v, causal=True)


def convert_attention(model: nn.Module, recipe: AttentionRecipe | None, clock: Clock) -> list[str]:
    """Put the recipe into every attention of `model` that can take one, or take it out again (None, or
    one that quantises nothing). Returns the names of those that have it now."""
    if recipe is not None and not recipe.quantises:
        recipe = None
    names = []
    for name, module in list(model.named_modules()):
        if getattr(type(module), "mixes", None) == MIXES:
            new = module.replaced if isinstance(module, Fp4CausalAttention) else module
            if recipe is not None:
                new = Fp4CausalAttention(new, AttentionPlan(recipe, clock, len(names)))
                names.append(name)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
    for name, module in huggingface.attention_modules(model, recipe is not None):
        module.plan = None if recipe is None else AttentionPlan(recipe, clock, len(names))
        if recipe is not None:
            names.append(name)
    return names
