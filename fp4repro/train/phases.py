"""The recipe of each step, put into the model: most runs have one, a late switch to BF16 makes two.

What holds is a function of the step alone, so a run resumed on either side of the switch goes on with
the same bits.
"""

from collections import Counter

from torch import nn

import fp4repro
from fp4repro.layers import Conversion


class Phases:
    """Keeps a model under `recipe.at(step / steps)`."""

    def __init__(self, model: nn.Module, recipe: fp4repro.Recipe, seed: int, steps: int) -> None:
        self.recipe = recipe
        self.seed = seed
        self.steps = steps
        self.current = recipe
        # What the recipe did to the model at first is what the run's files tell.
        self.conversions: list[Conversion] = [fp4repro.convert(model, recipe, seed=seed)]

    def enter(self, model: nn.Module, step: int) -> None:
        """Change the model's linears where `step` (from 0) has another recipe than the step before."""
        wanted = self.recipe.at(step / self.steps)
        if wanted != self.current:
            self.conversions.append(fp4repro.convert(model, wanted, seed=self.seed))
            self.current = wanted

    @property
    def conversion(self) -> Conversion:
        return self.conversions[0]

    def calls(self) -> dict[str, int]:
        """Operands quantised so far in this process, by slot."""
        return dict(sum((Counter(conversion.calls()) for conversion in self.conversions), Counter()))
