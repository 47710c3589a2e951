"""Which class of linear a recipe's side path asks for, and what such layers carry from step to step."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from fp4repro.errors import Fp4ReproError
from fp4repro.layers.linear import QuantLinear
from fp4repro.layers.lora_factors import LoraFactorLinear
from fp4repro.layers.lora_svd import LoraSVDLinear
from fp4repro.recipes import Recipe

CLASSES = (QuantLinear, LoraSVDLinear, LoraFactorLinear)


def class_for(recipe: Recipe) -> type[QuantLinear]:
    """Without a side path, or with one of rank 0, the plain `QuantLinear`."""
    if recipe.lora_svd is None or recipe.lora_svd.rank == 0:
        return QuantLinear
    return LoraFactorLinear if recipe.lora_svd.trainable_factors else LoraSVDLinear


def check_side_path(model: nn.Module, swapped: Mapping[str, nn.Linear], recipe: Recipe) -> None:
    """Refuse a rank that a layer has not, and trainable factors of a weight that others share."""
    if class_for(recipe) is QuantLinear:
        return
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, layer in swapped.items():
        try:
            recipe.lora_svd.rank_of(layer.out_features, layer.in_features)
        except Fp4ReproError as error:
            raise Fp4ReproError(f"recipe {recipe.name}, layer {name or 'itself'}: {error}") from None
        if recipe.lora_svd.trainable_factors and uses[id(layer.weight)] > 1:
            raise Fp4ReproError(
                f"recipe {recipe.name}, layer {name}: its weight is tied to another's, and trainable_factors "
                "would split it twice: untie it, or train W as a whole (trainable_factors=False)"
            )


def carried_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What converted layers carry from step to step beside their parameters, by layer: a run that is to
    go on bit for bit keeps it beside `state_dict`."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraSVDLinear)}
    return {name: layer.carried() for name, layer in layers.items()}


def restore_carried_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """The inverse of `carried_state`, after `load_state_dict`."""
    for name, carried in state.items():
        model.get_submodule(name).carry_on(carried)
