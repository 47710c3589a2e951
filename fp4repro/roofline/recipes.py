"""The recipes that speeds are published for: the trained ones, and two FP8 baselines of other suites."""

import difflib

from fp4repro.core.formats import FP8_TENSOR, MXFP8
from fp4repro.errors import Fp4ReproError
from fp4repro.recipes import SLOTS, KeepBF16, Recipe, recipe, recipe_names

_BASELINES = {
    "mxfp8": Recipe(name="mxfp8", **dict.fromkeys(SLOTS, MXFP8)),
    "fp8-tensor": Recipe(name="fp8-tensor", **dict.fromkeys(SLOTS, FP8_TENSOR)),
}


def speed_recipe_names() -> list[str]:
    """Recipes of linears alone: what Full-Stack FP4's other modules cost on a GPU is not modelled."""
    plain = recipe("bf16")
    whole = [name for name in recipe_names() if _of_linears(recipe(name), plain)]
    return [*whole, *_BASELINES]


def _of_linears(one: Recipe, plain: Recipe) -> bool:
    parts = ("lora_svd", "attention", "optimizer")
    return all(getattr(one, part) == getattr(plain, part) for part in parts)


def speed_recipe(name: str, keep: KeepBF16 | None = None) -> Recipe:
    """The recipe of that name, with another layer rule if given."""
    if name not in speed_recipe_names():
        near = difflib.get_close_matches(name, speed_recipe_names(), 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise Fp4ReproError(f"no recipe is named {name!r}{hint}; known: {', '.join(speed_recipe_names())}")
    found = _BASELINES.get(name) or recipe(name)
    return found if keep is None else found.replace(keep=keep)
