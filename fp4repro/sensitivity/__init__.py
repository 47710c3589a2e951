"""Which blocks of a model suffer the most from a recipe, and which to leave in BF16."""
