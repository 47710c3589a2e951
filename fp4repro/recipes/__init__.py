"""Training recipes as frozen data."""

from fp4repro.recipes.named import recipe, recipe_names
from fp4repro.recipes.projections import LoraSVD
from fp4repro.recipes.recipe import PRODUCTS, SLOTS, KeepBF16, LateBF16, Recipe

__all__ = ["PRODUCTS", "SLOTS", "KeepBF16", "LateBF16", "LoraSVD", "Recipe", "recipe", "recipe_names"]
