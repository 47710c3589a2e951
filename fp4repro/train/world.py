"""The processes of one run, as torchrun starts them: each takes its share of a step's micro-batches.

Every rank has the whole model; gradients are summed in FP32 by DistributedDataParallel. Random bits are
keyed by a micro-batch's number in its step, not by rank, and quantisers see one micro-batch at a time,
so a run on N ranks is the run on one with the same `accumulate`: the same operands, codes and products.
What is left is the order of the sums. Two micro-batches have only one, so two ranks with one each give
the same bits; with more, gradients differ by roundings of FP32.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp4repro.errors import Fp4ReproError


@dataclass(frozen=True)
class World:
    """This process among `size`; one alone needs no engine."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> "World":
        """The world that torchrun's variables tell of, or this process alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        if self.size > 1:
            dist.barrier()  # nobody goes while another still waits for an answer
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.rank == 0

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

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass sums gradients over ranks."""
        if self.size == 1:
            return model
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, _sum)
        return wrapped

    def summing(self, wrapped: nn.Module, now: bool) -> contextlib.AbstractContextManager:
        """Whether the backward pass within sums gradients, as only the last of a step needs to."""
        return contextlib.nullcontext() if now or self.size == 1 else wrapped.no_sync()

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def gather(self, values: Sequence[float]) -> list[float]:
        """Values of all ranks where each had every `size`-th, in their order."""
        if self.size == 1:
            return list(values)
        shares: list[list[float]] = [[]] * self.size
        dist.all_gather_object(shares, list(values))
        whole = [0.0] * sum(map(len, shares))
        for rank, share in enumerate(shares):
            whole[rank :: self.size] = share
        return whole


ALONE = World()


def _sum(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """In place of DDP's mean: micro-batches are weighed already."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
