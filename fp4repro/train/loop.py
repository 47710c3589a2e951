"""The training loop, and the state that it carries from step to step.

Master weights are FP32, products run under BF16 autocast, or quantised where the recipe swapped a
linear. A loss or gradient that is not finite ends the run: for a number format that is a result,
not a fault.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import nn

import fp4repro
from fp4repro.config import Training
from fp4repro.data.batches import Batches
from fp4repro.layers import carried_state, restore_carried_state
from fp4repro.optim import adopt_adamw
from fp4repro.train import gradients, shards
from fp4repro.train.evaluate import HeldOut, microbatches, validation_loss
from fp4repro.train.phases import Phases
from fp4repro.train.schedule import learning_rate
from fp4repro.train.world import ALONE, World

CURVE = ("step", "tokens", "learning_rate", "train_loss", "gradient_norm", "validation_loss")


@dataclass
class Run:
    """A run between two steps; `curve` has one row a step, in the order of `CURVE`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settings: Training
    device: torch.device
    phases: Phases | None = None  # None: the model stays as it is
    world: World = ALONE
    curve: list[list[float | None]] = field(default_factory=list)
    diverged: str = ""  # what was not finite, and when

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.curve)

    @cached_property
    def shared(self) -> nn.Module:
        """The model whose backward pass sums gradients over ranks; made once it is converted."""
        return self.model if self.sums_in_bf16 else self.world.wrap(self.model)

    @property
    def sums_in_bf16(self) -> bool:
        """By our own hand: FSDP2 has its way."""
        return self.settings.gradients == "bf16" and not self.world.shards

    @property
    def finished(self) -> bool:
        return bool(self.diverged) or self.step == self.settings.steps

    def column(self, name: str) -> list[float | None]:
        """One column of the curve."""
        return [row[CURVE.index(name)] for row in self.curve]

    def last(self, name: str) -> float | None:
        """The last step's value in a column."""
        return self.curve[-1][CURVE.index(name)]

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's `state_dict`, whole; all ranks must ask, and of shards only the first gets it."""
        return shards.whole_state(self.model) if self.world.shards else self.model.state_dict()

    def state(self) -> dict:
        """What a checkpoint in one file holds of an unfinished run."""
        return {
            "model": self.model.state_dict(),
            "layers": carried_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "curve": self.curve,
        }

    def restore(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        restore_carried_state(self.model, state["layers"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curve = state["curve"]

    def leave(self, trunk: dict) -> None:
        """Begin as a branch at the state of a BF16 run; the optimizer may be another AdamW than its own."""
        self.model.load_state_dict(trunk["model"])
        adopt_adamw(self.optimizer, self.model, trunk["optimizer"])
        self.curve = trunk["curve"]

    def train(self, batches: Batches, held: HeldOut, after: Callable[[], None]) -> None:
        """Train to the end; `after` is called after each step."""
        self.model.train()
        while not self.finished:
            self.advance(*batches[self.step], held)
            after()

    def advance(self, tokens: np.ndarray, targets: np.ndarray, held: HeldOut | None) -> None:
        """One step: tokens and targets are (batch, context); `held` may lack where no validation is due."""
        step, settings = self.step, self.settings
        if self.phases:
            self.phases.enter(self.model, step)
        rate = learning_rate(step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, norm = self._gradients(tokens, targets)
        validation = None
        if self._finite("training loss", loss) and self._finite("gradient norm", norm):
            self.optimizer.step()
            if (step + 1) % settings.validation_every == 0 or step + 1 == settings.steps:
                validation = validation_loss(self.model, held, settings.microbatch, self.device, self.world)
                self._finite("validation loss", validation)
        self.curve.append([step + 1, (step + 1) * settings.tokens_per_step, rate, loss, norm, validation])

    def _gradients(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        """Mean loss and gradient norm before clipping; leaves the clipped gradients in place."""
        self.optimizer.zero_grad()
        if self.sums_in_bf16:
            gradients.sum_in_bf16(self.model)
        loss = torch.zeros((), device=self.device)
        mine = self.world.share(self.settings.accumulate)
        sequences = slice(mine.start * self.settings.microbatch, mine.stop * self.settings.microbatch)
        pieces = microbatches(tokens[sequences], targets[sequences], self.settings.microbatch, self.device)
        for number, piece in zip(mine, pieces, strict=True):
            fp4repro.set_step(self.model, self.step, number)
            with self.world.summing(self.shared, now=number == mine[-1]):
                with torch.autocast(self.device.type, torch.bfloat16):
                    part = self.shared(*piece) / self.settings.accumulate
                part.backward()
            loss += part.detach()
        self.world.total(loss)
        if self.sums_in_bf16:
            gradients.as_fp32(self.model, self.world.total)
        return loss.item(), self.world.clip(self.model, self.settings.clip)

    def validation_loss_in_bf16(self, held: HeldOut) -> float:
        """The loss of the trained weights without the recipe, by all ranks; the run cannot go on after it."""
        fp4repro.convert(self.model, fp4repro.recipe("bf16"))
        return validation_loss(self.model, held, self.settings.microbatch, self.device, self.world)

    def _finite(self, what: str, value: float) -> bool:
        if not math.isfinite(value):
            self.diverged = f"diverged: {what} is {value} at step {self.step + 1}"
        return not self.diverged
