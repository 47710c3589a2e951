"""End-to-end fidelity: weight gradients of the whole model under a recipe, and its loss.

The reference is the same model in FP32 throughout. Errors of all layers and of the forward pass add
up here, the recipe's rule for BF16 layers holds, and draws differ by the step of their key.
"""

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from fp4repro.fidelity.moments import Errors, square
from fp4repro.fidelity.subject import Subject
from fp4repro.layers import Conversion, convert, set_step
from fp4repro.recipes import Recipe, recipe


@dataclass(frozen=True)
class WholeFidelity:
    """All weight gradients of the blocks as one vector, and the loss; squares relative to the exact."""

    error: float
    spread: float  # standard deviation over draws of the relative error, not squared; 0 for one draw
    bias: float
    noise: float
    cosine: float
    loss: float  # mean over draws, nats a token
    quantised: int  # linears


class Whole:
    """The exact gradients of a subject, against which recipes are held."""

    def __init__(self, subject: Subject, seed: int = 0) -> None:
        self.subject = subject
        self.seed = seed
        self.loss, self.exact = _gradients(subject, autocast=False)
        self.size = sum(square(g) for g in self.exact.values())

    def fidelity(self, under: Recipe, draws: int = 1) -> WholeFidelity:
        """Of `draws` passes under a recipe; recipes without randomness need one."""
        with converted(self.subject, under, self.seed) as conversion:
            errors = {name: Errors() for name in self.exact}
            losses, cosines, squares = [], [], []
            for draw in range(draws):
                set_step(self.subject.model, draw)
                loss, got = _gradients(self.subject)
                losses.append(loss)
                dot = sum(float((got[name] * g).sum()) for name, g in self.exact.items())
                cosines.append(dot / (self.size * sum(square(g) for g in got.values())) ** 0.5)
                differences = {name: got[name].sub_(g) for name, g in self.exact.items()}
                squares.append(sum(map(square, differences.values())) / self.size)
                for name, difference in differences.items():
                    errors[name].add(difference)
        return WholeFidelity(
            error=sum(squares) / draws,
            spread=statistics.stdev(map(math.sqrt, squares)) if draws > 1 else 0.0,
            bias=sum(e.bias_square for e in errors.values()) / self.size,
            noise=sum(e.variance for e in errors.values()) / self.size,
            cosine=sum(cosines) / draws,
            loss=sum(losses) / draws,
            quantised=len(conversion.swapped),
        )


@contextmanager
def converted(subject: Subject, under: Recipe, seed: int) -> Iterator[Conversion]:
    """The subject's model under a recipe, and in BF16 again afterwards."""
    try:
        yield convert(subject.model, under, seed)
    finally:
        convert(subject.model, recipe("bf16"))


def _gradients(subject: Subject, autocast: bool = True) -> tuple[float, dict[str, Tensor]]:
    """Loss, and the weight gradient of each linear of the blocks."""
    subject.model.zero_grad()
    loss = subject.loss(autocast)
    loss.backward()
    found = {name: layer.weight.grad for name, layer in subject.linears.items()}
    subject.model.zero_grad()  # lets go of them; they live on in `found`
    return loss.item(), found
