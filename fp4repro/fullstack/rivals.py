"""torchao's low-bit AdamW, for comparison where it is installed: a development extra, never needed."""

from collections.abc import Callable

import torch
from torch import nn

from fp4repro.fullstack.tiny_lm import Setup
from fp4repro.optim import parameter_groups

RIVALS = {"torchao-adamw4bit": "AdamW4bit", "torchao-adamw8bit": "AdamW8bit"}

Make = Callable[[nn.Module], torch.optim.Optimizer]


def rival(name: str, setup: Setup) -> tuple[Make | None, str]:
    """A function from a model to that optimizer, or None and why not."""
    try:
        from torchao import optim as theirs
    except ModuleNotFoundError:
        return None, "torchao is not installed"
    except Exception as error:  # whatever another library raises under another torch
        return None, f"torchao failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    kind = getattr(theirs, RIVALS[name], None)
    if kind is None:
        return None, f"this torchao has no {RIVALS[name]}"

    def make(net: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(net, setup.weight_decay)
        return kind(groups, lr=setup.learning_rate, betas=setup.betas, eps=setup.eps)

    return make, ""
