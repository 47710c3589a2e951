"""The arithmetic that a forward pass is evaluated in: a recipe by name, with additions.

`nvfp4+rht` is the recipe nvfp4 with the Hadamard transform on both operands of fprop. ArXiv 2509.25149 has
it on wgrad alone, where an evaluation never gets to: without an addition it plays no part. Which layers
stay in BF16 is the recipe's own rule.
"""

import fp4repro
from fp4repro.errors import Fp4ReproError
from fp4repro.recipes import Recipe


def _with_rht(recipe: Recipe) -> Recipe:
    return recipe.replace(hadamard=("fprop",))


ADDITIONS = {"rht": _with_rht}


def arithmetic(name: str) -> Recipe:
    """The recipe that a name such as `bf16`, `nvfp4` or `nvfp4+rht` stands for, under that name."""
    base, *additions = name.split("+")
    recipe = fp4repro.recipe(base)
    if additions and not recipe.quantises:
        raise Fp4ReproError(f"arithmetic {name!r}: {base} quantises nothing that could be added to")
    for addition in additions:
        if addition not in ADDITIONS:
            known = ", ".join(ADDITIONS)
            raise Fp4ReproError(f"arithmetic {name!r}: {addition!r} is no addition; known: {known}")
        recipe = ADDITIONS[addition](recipe)
    return recipe.replace(name=name)
