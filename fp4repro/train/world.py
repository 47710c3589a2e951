"""The processes of one run, as torchrun starts them: each takes its share of a step's micro-batches.

`ddp`: every rank has the whole model, and DistributedDataParallel sums gradients. `fsdp`: see `shards`.
Random bits are keyed by a micro-batch's number in its step, not by rank, and quantisers see one
micro-batch at a time, whose sequences no two ranks share (nor, so, a group of the Hadamard transform).
A run on N ranks is thus the run on one with the same `accumulate`: the same operands, codes and products.
What is left is the order of the sums. Two micro-batches have only one, so two ranks with one each give
the same bits; with more, gradients differ by roundings of FP32.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp4repro.config import Training
from fp4repro.errors import Fp4ReproError
from fp4repro.train import gradients, shards


@dataclass(frozen=True)
class World:
    """This process among `size`; one alone needs no engine."""

    rank: int = 0
    size: int = 1
    parallel: str = "ddp"

    @classmethod
    def join(cls, device: torch.device, parallel: str = "ddp") -> "World":
        """The world that torchrun's variables tell of, or this process alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(parallel=parallel)
        if device.type == "cuda":  # "cuda" then means this rank's own
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), parallel)

    def leave(self) -> None:
        if self.size > 1:
            dist.barrier()  # nobody goes while another still waits for an answer
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Whether each rank has a part of every parameter alone."""
        return self.size > 1 and self.parallel == "fsdp"

    def check(self, accumulate: int) -> None:
        if accumulate % self.size:
            raise Fp4ReproError(
                f"training.accumulate is {accumulate}, which {self.size} ranks cannot share evenly: set it "
                f"to a multiple of {self.size} in the scale file, or start another number of ranks"
            )

    def share(self, count: int) -> range:
        """The numbers of this rank's micro-batches, of `count` in a step."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def deal(self, pieces: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
        """Every `size`-th piece, for this rank. Where ranks must run in step, one that has no piece left
        gets the first again, and False: its result does not count."""
        mine = list(pieces[self.rank :: self.size])
        for piece in mine:
            yield piece, True
        if self.shards and len(mine) < -(-len(pieces) // self.size):
            yield pieces[0], False

    def place(self, model: nn.Module, device: torch.device, training: Training) -> None:
        """Bring a model to the device, or this rank's shards of it; before its optimizer is made."""
        if self.shards:
            shards.shard(model, device, training)
        model.to(device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass sums gradients over ranks."""
        if self.size == 1 or self.shards:
            return model
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, gradients.summed)
        return wrapped

    @contextlib.contextmanager
    def summing(self, wrapped: nn.Module, now: bool) -> Iterator[None]:
        """Whether the backward pass within sums gradients, as only the last of a step needs to."""
        if self.shards:
            wrapped.set_requires_gradient_sync(now)
        waits = isinstance(wrapped, DistributedDataParallel) and not now
        with wrapped.no_sync() if waits else contextlib.nullcontext():
            yield

    def clip(self, model: nn.Module, largest: float) -> float:
        """Scale gradients down to the norm `largest`; the norm before."""
        parameters = list(model.parameters())
        if self.parallel == "fsdp":
            norm = shards.gradient_norm(parameters, self.total)
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        else:
            norm = nn.utils.clip_grad_norm_(parameters, largest)
        return norm.item()

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def everyones(self, value: Any) -> list[Any]:
        """What each rank has to say, in their order."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def refuse(self, problem: str) -> None:
        """End all ranks if one has a problem, with one sentence for all."""
        problems = list(filter(None, self.everyones(problem)))
        if problems and self.leads:
            raise Fp4ReproError(problems[0])
        if problems:
            raise SystemExit(2)

    def gather(self, values: Sequence[float]) -> list[float]:
        """Values of all ranks where each had every `size`-th, in their order."""
        shares = self.everyones(list(values))
        whole = [0.0] * sum(map(len, shares))
        for rank, share in enumerate(shares):
            whole[rank :: self.size] = share
        return whole


ALONE = World()
