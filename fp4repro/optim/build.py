"""From a recipe to an optimizer of a model's parameters: the one place where training meets this package."""

from typing import Protocol

import torch
from torch import nn

from fp4repro.optim.adamw import adamw, parameter_groups
from fp4repro.optim.muon import NVFP4Muon
from fp4repro.optim.nvfp4_adamw import NVFP4AdamW
from fp4repro.recipes.optimizer import OptimizerRecipe


class Settings(Protocol):
    """The fields of `config.Training` that an optimizer needs."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def build_optimizer(
    model: nn.Module, recipe: OptimizerRecipe, training: Settings, seed: int = 0
) -> torch.optim.Optimizer:
    """The recipe's optimizer. FP32 AdamW is torch's own, to the bit what `adamw` gives.

    Muon takes the matrices inside the model: not embeddings, and not the output head, whose rows are
    tokens as theirs are.
    """
    options = (training.learning_rate, training.betas, training.eps, training.weight_decay)
    if recipe.kind == "adamw" and recipe.first is recipe.second is None:
        return adamw(model, *options)
    groups = parameter_groups(model, training.weight_decay)
    if recipe.kind == "muon":
        groups = _split(groups, hidden_matrices(model))
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        group["params"] = [(names[id(p)], p) for p in group["params"]]
    if recipe.kind == "muon":
        return NVFP4Muon(groups, *options, recipe=recipe, seed=seed)
    return NVFP4AdamW(groups, *options, first=recipe.first, second=recipe.second, seed=seed)


def hidden_matrices(model: nn.Module) -> set[int]:
    """ids of the weights of linears, without the last one of the model (its head)."""
    linears = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {id(w) for w in linears[:-1]} - embeddings


def _split(groups: list[dict], matrices: set[int]) -> list[dict]:
    """The same groups, each in two: its matrices for Muon, and the rest."""
    split = [
        group | {"params": [p for p in group["params"] if (id(p) in matrices) == muon], "muon": muon}
        for group in groups
        for muon in (True, False)
    ]
    return [group for group in split if group["params"]]
