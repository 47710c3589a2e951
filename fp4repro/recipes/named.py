"""The recipes by name.

nvfp4  the whole recipe of arXiv 2509.25149 for its 12B model: 2 + 8 of 62 blocks in BF16, Hadamard 16
       on wgrad, 16x16 weight scales, stochastic rounding of gradients.
mxfp4  the same with MX blocks of 32 and their power-of-two scales; Hadamard 32 (section 5). The paper
       does not say how its MXFP4 weights are scaled: 32x32 here, by analogy.
fp8    the paper's baseline (section 3): E4M3, 1x128 and 128x128, 1 + 2 of 62 blocks in BF16.
bf16   nothing quantised.
"""

import difflib

from fp4repro.core.formats import FP8, MXFP4, NVFP4, BlockFormat
from fp4repro.errors import Fp4ReproError
from fp4repro.recipes.recipe import KeepBF16, Recipe


def _all_slots(fmt: BlockFormat, weights: BlockFormat) -> dict[str, BlockFormat]:
    return {
        "x_fprop": fmt,
        "w_fprop": weights,
        "dy_dgrad": fmt,
        "w_dgrad": weights,
        "dy_wgrad": fmt,
        "x_wgrad": fmt,
    }


_RECIPES = {
    r.name: r
    for r in (
        Recipe(name="bf16"),
        Recipe(
            name="fp8",
            **_all_slots(FP8, FP8.with_block(128, 128)),
            keep=KeepBF16(first=1, last=2, of=62),
        ),
        Recipe(
            name="nvfp4",
            **_all_slots(NVFP4, NVFP4.with_block(16, 16)),
            stochastic=("dy_dgrad", "dy_wgrad"),
            hadamard=("wgrad",),
            keep=KeepBF16(first=2, last=8, of=62),
        ),
        Recipe(
            name="mxfp4",
            **_all_slots(MXFP4, MXFP4.with_block(32, 32)),
            stochastic=("dy_dgrad", "dy_wgrad"),
            hadamard=("wgrad",),
            hadamard_size=32,
            keep=KeepBF16(first=2, last=8, of=62),
        ),
    )
}


def recipe_names() -> list[str]:
    return list(_RECIPES)


def recipe(name: str) -> Recipe:
    """The recipe of that name; an unknown one is refused with the nearest name and the list."""
    if name not in _RECIPES:
        near = difflib.get_close_matches(name, _RECIPES, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise Fp4ReproError(f"no recipe is named {name!r}{hint}; known: {', '.join(_RECIPES)}")
    return _RECIPES[name]
