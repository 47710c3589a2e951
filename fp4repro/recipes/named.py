"""The recipes by name.

nvfp4  the whole recipe of arXiv 2509.25149 for its 12B model: 2 + 8 of 62 blocks in BF16, Hadamard 16
       on wgrad, 16x16 weight scales, stochastic rounding of gradients.
mxfp4  the same with MX blocks of 32 and their power-of-two scales; Hadamard 32 (section 5). The paper
       does not say how its MXFP4 weights are scaled: 32x32 here, by analogy.
fp8    the paper's baseline (section 3): E4M3, 1x128 and 128x128, 1 + 2 of 62 blocks in BF16.
bf16   nothing quantised.

four-over-six  nvfp4 with Four Over Six (arXiv 2512.02010, least squares) on x, as Full-Stack FP4 quantises
       directly; not on 16x16 weights, where it gains nothing, nor on gradients, which its own training
       code rounds with head-room of 16/17. BF16 layers are those of nvfp4, not its last 4 of 24.
nvfp4-lora-svd, four-over-six-lora-svd  the same with leading directions in BF16 (arXiv 2607.04422).
full-stack-fp4, full-stack-fp4-muon  Full-Stack FP4 (arXiv 2607.04422): four-over-six-lora-svd, attention in
       4 bits, and optimizer states in 4 bits, of AdamW, or of Muon with Newton-Schulz in NVFP4 (the paper's
       headline has ROOT, a Muon). What the paper leaves open stands in the fields of the three parts.
fp4-all-the-way  arXiv 2505.19115: blocks of 1x16 everywhere, stochastic rounding of dy and of x in wgrad,
       no transform, no BF16 layers. Without its last phase of BF16 backward passes.
nemotron3-super  nvfp4 with that model's rule of layers (arXiv 2604.12374): the last 15 % and attention's
       projections in BF16. Its Mamba output projection is MXFP8: BF16 here, one format a recipe.
"""

import difflib

from fp4repro.core.formats import FP8, MXFP4, NVFP4, BlockFormat
from fp4repro.errors import Fp4ReproError
from fp4repro.recipes.attention import AttentionRecipe
from fp4repro.recipes.optimizer import NVFP4_ADAMW, NVFP4_MUON
from fp4repro.recipes.projections import LoraSVD
from fp4repro.recipes.recipe import KeepBF16, Recipe

# A block of four has a scale 1.5 times larger, for which 256 leaves room below 448.
_SIX_OR_FOUR = NVFP4.replace(four_over_six="mse", scale_target=256.0)
_ATTENTION = tuple(f"*.{letter}{end}" for letter in "qkvo" for end in ("", "_proj"))


def _all_slots(fmt: BlockFormat, weights: BlockFormat) -> dict[str, BlockFormat]:
    return {
        "x_fprop": fmt,
        "w_fprop": weights,
        "dy_dgrad": fmt,
        "w_dgrad": weights,
        "dy_wgrad": fmt,
        "x_wgrad": fmt,
    }


_PAPERS = {
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

_FOUR_OVER_SIX = _PAPERS["nvfp4"].replace(name="four-over-six", x_fprop=_SIX_OR_FOUR, x_wgrad=_SIX_OR_FOUR)
_FULL_STACK = {"lora_svd": LoraSVD(), "attention": AttentionRecipe()}
_RECIPES = _PAPERS | {
    r.name: r
    for r in (
        _FOUR_OVER_SIX,
        _PAPERS["nvfp4"].replace(name="nvfp4-lora-svd", lora_svd=LoraSVD()),
        _FOUR_OVER_SIX.replace(name="four-over-six-lora-svd", lora_svd=LoraSVD()),
        _FOUR_OVER_SIX.replace(name="full-stack-fp4", optimizer=NVFP4_ADAMW, **_FULL_STACK),
        _FOUR_OVER_SIX.replace(name="full-stack-fp4-muon", optimizer=NVFP4_MUON, **_FULL_STACK),
        Recipe(
            name="fp4-all-the-way",
            **_all_slots(NVFP4, NVFP4),
            stochastic=("dy_dgrad", "dy_wgrad", "x_wgrad"),
        ),
        _PAPERS["nvfp4"].replace(
            name="nemotron3-super",
            keep=KeepBF16(last=15, of=100, names=(*_ATTENTION, "*.out_proj")),
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
