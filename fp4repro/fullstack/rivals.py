"""torchao's low-bit AdamW on the tiny language model, where it is installed."""

from collections.abc import Callable

import torch
from torch import nn

from fp4repro.fullstack.tiny_lm import Setup
from fp4repro.optim import parameter_groups
from fp4repro.optim.rivals import RIVALS, rival_class

__all__ = ["RIVALS", "rival"]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def rival(name: str, setup: Setup) -> tuple[Make | None, str]:
    """A function from a model to that optimizer, or None and why not."""
    kind, why_not = rival_class(name)
    if kind is None:
        return None, why_not

    def make(net: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(net, setup.weight_decay)
        return kind(groups, lr=setup.learning_rate, betas=setup.betas, eps=setup.eps)

    return make, ""
