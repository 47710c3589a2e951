"""Training recipes as frozen data."""

from fp4repro.recipes.attention import ATTENTION_PRODUCTS, AttentionRecipe
from fp4repro.recipes.named import recipe, recipe_names
from fp4repro.recipes.recipe import PRODUCTS, SLOTS, KeepBF16, Recipe

__all__ = [
    "ATTENTION_PRODUCTS",
    "PRODUCTS",
    "SLOTS",
    "AttentionRecipe",
    "KeepBF16",
    "Recipe",
    "recipe",
    "recipe_names",
]
