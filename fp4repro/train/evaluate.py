"""Validation loss and bits per byte on a fixed set of held-out windows.

During a run evaluation has the recipe's quantised products in its forward pass; at the end the loss of
the same weights in BF16, in which the NVFP4 paper evaluates tasks, stands beside it. Bits per byte
divide by the bytes that the predicted tokens stand for, so that they compare across tokenizers; a token
that ends a text costs bits and has no bytes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fp4repro.config import Training
from fp4repro.data.batches import evenly
from fp4repro.data.tokens import TokenData
from fp4repro.errors import Fp4ReproError
from fp4repro.train.world import ALONE, World


@dataclass(frozen=True)
class HeldOut:
    """The windows of the validation loss: int64, (windows, context), and the bytes predicted."""

    tokens: Tensor
    targets: Tensor
    nbytes: int

    def bits_per_byte(self, loss: float) -> float:
        """From the mean loss of these targets, in nats a token."""
        return loss * self.targets.numel() / math.log(2) / self.nbytes


def held_out(data: TokenData, settings: Training) -> HeldOut:
    """`validation_tokens` targets in windows spread evenly over the held-out text."""
    if settings.validation_tokens >= len(data.validation):
        raise Fp4ReproError(
            f"training.validation_tokens asks for {settings.validation_tokens} tokens, but the held-out text "
            f"has {len(data.validation)}: lower it or hold out more text"
        )
    count = settings.validation_tokens // settings.context
    tokens, targets = evenly(data.validation, count, settings.context)
    nbytes = int(data.token_bytes[targets].sum())
    return HeldOut(torch.from_numpy(tokens), torch.from_numpy(targets), nbytes)


def microbatches(
    tokens: Tensor | np.ndarray, targets: Tensor | np.ndarray, size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of at most `size` sequences, on the device."""
    for start in range(0, len(tokens), size):
        piece = slice(start, start + size)
        yield tuple(torch.as_tensor(side[piece]).to(device) for side in (tokens, targets))


@torch.no_grad()
def validation_loss(
    model: nn.Module, held: HeldOut, size: int, device: torch.device, world: World = ALONE
) -> float:
    """Mean cross entropy over all targets, nats a token, `size` sequences at a time; each rank of `world`
    takes its share."""
    model.eval()
    sums = []
    starts = range(0, len(held.tokens), size)
    for start, counts in world.deal(starts):
        piece = slice(start, start + size)
        ((tokens, targets),) = microbatches(held.tokens[piece], held.targets[piece], size, device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens, targets).item()
        if counts:
            sums.append(loss * targets.numel())
    model.train()
    return sum(world.gather(sums)) / held.targets.numel()
