"""Training recipes as frozen data."""

from fp4repro.recipes.attention import ATTENTION_PRODUCTS, AttentionRecipe
from fp4repro.recipes.named import recipe, recipe_names
from fp4repro.recipes.optimizer import OptimizerRecipe, StateCodec
from fp4repro.recipes.projections import LoraSVD
from fp4repro.recipes.recipe import PRODUCTS, SLOTS, KeepBF16, LateBF16, Recipe

__all__ = [
    "ATTENTION_PRODUCTS",
    "PRODUCTS",
    "SLOTS",
    "AttentionRecipe",
    "KeepBF16",
    "LateBF16",
    "LoraSVD",
    "OptimizerRecipe",
    "Recipe",
    "StateCodec",
    "recipe",
    "recipe_names",
]
