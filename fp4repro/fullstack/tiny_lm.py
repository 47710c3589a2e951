"""A byte language model small enough to train once for each way of storing an optimizer's state.

Two layers of attention and feed-forward in FP32, on the sources of the running Python's standard library.
The head's rows of bytes that never occur have no gradient: the states that break a logarithm. Learning rate
3e-3 with a cosine to a tenth of it, betas (0.9, 0.95), decay 0.1 of matrices, gradients clipped at 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from fp4repro.data.batches import Batches, evenly
from fp4repro.data.stdlib import load_stdlib
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.optim import build_optimizer
from fp4repro.recipes import OptimizerRecipe

TEXT_BYTES = 2_000_000  # of training text; a twentieth of that is held out
WINDOWS = 64  # of the validation loss
WARM_UP = 20  # steps, or half of a shorter run, whose training loss does not count as a later one


@dataclass(frozen=True)
class Setup:
    """A run's sizes; with its numbers `optim.build_optimizer`'s settings too."""

    steps: int = 400
    width: int = 128
    batch: int = 16
    context: int = 64
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Outcome:
    """Nats a byte; `diverged` says when something was not finite, and then the losses are None."""

    validation: float | None
    largest_later: float | None
    diverged: str = ""


@lru_cache(maxsize=1)
def text() -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes."""
    corpus = load_stdlib()
    pieces = []
    for documents, limit in ((corpus.train, TEXT_BYTES), (corpus.validation, TEXT_BYTES // 20)):
        joined = "\n".join(document.text for document in documents).encode()
        pieces.append(np.frombuffer(joined[:limit], dtype=np.uint8))
    return pieces[0], pieces[1]


def model(setup: Setup, seed: int) -> HybridModel:
    heads = max(setup.width // 32, 1)
    sizes = {"query_heads": heads, "kv_heads": heads, "head_dim": setup.width // heads}
    config = ModelConfig("*-*-", setup.width, 256, ffn_width=4 * setup.width, positions="rope", **sizes)
    return HybridModel(config, torch.Generator().manual_seed(seed))


def run(
    setup: Setup,
    make: OptimizerRecipe | Callable[[nn.Module], torch.optim.Optimizer],
    seed: int = 0,
    after: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
) -> Outcome:
    """Train; `make` is a recipe or a function of the model. `after` sees each step's gradients."""
    train, validation = text()
    net = model(setup, seed)
    built = build_optimizer(net, make, setup, seed) if isinstance(make, OptimizerRecipe) else make(net)
    batches = Batches(train, setup.batch, setup.context, seed)
    largest = -math.inf
    for step in range(setup.steps):
        for group in built.param_groups:
            set_rate(group, setup.learning_rate * _cosine(step / setup.steps))
        tokens, targets = (torch.from_numpy(side) for side in batches[step])
        built.zero_grad()
        loss = net(tokens, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if not math.isfinite(loss.item() + norm.item()):
            return Outcome(None, None, f"diverged: not finite at step {step + 1}")
        if step >= min(WARM_UP, setup.steps // 2):
            largest = max(largest, loss.item())
        built.step()
        if after is not None:
            after(net, built)
    loss = _validation(net, validation, setup)
    if not math.isfinite(loss):
        return Outcome(None, None, "diverged: validation loss not finite")
    return Outcome(loss, largest)


def set_rate(group: dict, rate: float) -> None:
    """Of an optimizer's group. torchao keeps the rate in a tensor, and refuses another object."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _cosine(done: float) -> float:
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def _validation(net: nn.Module, tokens: np.ndarray, setup: Setup) -> float:
    inputs, targets = (torch.from_numpy(side) for side in evenly(tokens, WINDOWS, setup.context))
    return float(net(inputs, targets))


def matrices(net: nn.Module) -> list[Tensor]:
    """The parameters with two axes that have gradients."""
    return [p for p in net.parameters() if p.ndim == 2 and p.grad is not None]
