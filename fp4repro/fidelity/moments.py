"""Bias and noise of an estimate from n draws, told apart.

With errors e_i of n independent draws, their mean m and sample variance S^2 = sum |e_i - m|^2 / (n - 1),
E |m|^2 = |bias|^2 + variance / n. So |m|^2 - S^2 / n estimates |bias|^2 without the noise that the mean
of n draws still holds; it can come out negative where there is no bias. A rounding without randomness
has one draw, which is all bias.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


def square(x: Tensor) -> float:
    """Sum of squares."""
    return float(torch.linalg.vector_norm(x)) ** 2


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length())]


@dataclass
class Errors:
    """Errors of the draws of one matrix, added one at a time; only their sum is kept.

    means   number of draws, a power of two -> |mean error of the first so many draws|^2
    """

    draws: int = 0
    squares: float = 0.0
    total: Tensor | None = None
    means: dict[int, float] = field(default_factory=dict)

    def add(self, error: Tensor) -> None:
        """Takes `error` over: a later draw may be added into it."""
        self.draws += 1
        self.squares += square(error)
        self.total = error if self.total is None else self.total.add_(error)
        if self.draws in powers_of_two(self.draws):
            self.means[self.draws] = square(self.total) / self.draws**2

    @property
    def mean_square(self) -> float:
        """E |error|^2 of one draw."""
        return self.squares / self.draws

    @property
    def variance(self) -> float:
        """S^2, 0 for a single draw."""
        if self.draws == 1:
            return 0.0
        return (self.squares - square(self.total) / self.draws) / (self.draws - 1)

    @property
    def bias_square(self) -> float:
        """Estimate of |bias|^2, without the noise of the mean of so many draws."""
        return square(self.total) / self.draws**2 - self.variance / self.draws
