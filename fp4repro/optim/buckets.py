"""Many small parameters stepped as one, so that a step costs a few passes whatever their number.

A bucket holds the states of its parameters in flat tensors; what the optimizer's `state` shows of a
parameter are views of them. Gradients are gathered into one tensor and parameters scattered back; a large
contiguous parameter is a bucket of its own and is stepped in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fp4repro.core.compiled import compiled, eager
from fp4repro.core.random import RandomKey
from fp4repro.optim.codecs import decode, encode, exact_sqrt, fields_of
from fp4repro.optim.fused import fusable, fused_step
from fp4repro.optim.shards import groups_of, local, number_of
from fp4repro.recipes.optimizer import BLOCK, StateCodec

MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST = 2**20  # elements of a bucket of several parameters


def make_step(
    first: StateCodec | None, second: StateCodec | None, groups: tuple = ()
) -> Callable[..., Tensor]:
    """One AdamW step of a bucket, in place: the moments decoded, advanced, used, and encoded again.

    The update uses the moments before they are encoded. `hyper`, float32 (7,): 1 - lr * decay, 1 - beta1,
    beta2, 1 - beta2, lr / correction1, 1 / sqrt(correction2), eps.
    """
    count = len(fields_of(first))

    def step(
        p: Tensor, g: Tensor, owner: Tensor, lengths: Tensor, hyper: Tensor, noise: Tensor, *stored: Tensor
    ) -> Tensor:
        keep, take1, beta2, take2, rate, unbias, eps = hyper.unbind()
        m = decode(stored[:count], first, owner)
        v = decode(stored[count:], second, owner)
        m = m + (g - m) * take1
        v = v * beta2 + g * g * take2
        p.copy_(p * keep - rate * m / (exact_sqrt(v) * unbias + eps))
        new = (
            *encode(m, first, owner, lengths, noise[0], groups),
            *encode(v, second, owner, lengths, noise[1], groups),
        )
        for old, value in zip(stored, new, strict=True):
            old.copy_(value)
        return p

    return step


def grouped(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters in their order, cut into lists of at most LARGEST elements and of one sharding: the
    same lists on every rank."""
    lists: list[list[Tensor]] = []
    size = LARGEST
    for p in params:
        n = p.numel()
        if size + n > LARGEST or groups_of(p) != groups_of(lists[-1][0]):
            lists.append([])
            size = 0
        lists[-1].append(p)
        size += n
    return lists


class Bucket:
    """Parameters (float32, rows of whole blocks) with their states, taken over from `states`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict],
        codecs: tuple[StateCodec | None, StateCodec | None],
        number: int,
    ) -> None:
        self.params, self.codecs, self.number = list(params), codecs, number
        shards = [local(p) for p in params]
        device = shards[0].device
        self._sizes = [shard.numel() for shard in shards]
        self._in_place = len(shards) == 1 and shards[0].is_contiguous()
        self.lengths = torch.tensor([n // BLOCK for n in self._sizes], device=device)
        numbers = torch.arange(len(shards), device=device)
        self.owner = torch.repeat_interleave(numbers, self.lengths)
        self._groups = groups_of(params[0])
        self._fused = not self._groups and fusable(codecs, device)
        self.stored: list[Tensor] = []
        for moment, codec in zip(MOMENTS, codecs, strict=True):
            zeros = torch.zeros(sum(self._sizes) // BLOCK, BLOCK, device=device)
            noise = torch.zeros(2, dtype=torch.int32, device=device)
            flat = [t.contiguous() for t in encode(zeros, codec, self.owner, self.lengths, noise)]
            self.stored += flat
            self._share(moment, dict(zip(fields_of(codec), flat, strict=True)), states)

    def _share(self, moment: str, flat: dict[str, Tensor], states: Sequence[dict]) -> None:
        """Copy what `states` hold into the flat fields, and let them hold views of these instead."""
        total = max(sum(self._sizes), 1)
        views: list[dict[str, Tensor]] = [{} for _ in states]
        for name, values in flat.items():
            rows = [1 if name == "amax" else len(values) * n // total for n in self._sizes]
            for state, view, piece in zip(states, views, values.split(rows), strict=True):
                if moment in state:
                    piece.copy_(state[moment][name])
                view[name] = piece
        for state, view in zip(states, views, strict=True):
            state[moment] = view

    def step(self, hyper: Sequence[float], key: RandomKey) -> None:
        """Step every parameter by its gradient."""
        shards = [local(p) for p in self.params]
        if self._fused and all(shard.is_contiguous() for shard in shards):
            grads = [local(q.grad).float().contiguous() for q in self.params]
            blocks = [n // BLOCK for n in self._sizes]
            fused_step(shards, grads, blocks, self.codecs[1].floor, hyper, self.stored)
            return
        device = shards[0].device
        p = shards[0].view(-1, BLOCK) if self._in_place else _flat(shards)
        g = _flat([local(q.grad) for q in self.params])
        keys = [replace(key, layer=self.number, role=role, rank=number_of(self._groups)) for role in (0, 1)]
        noise = torch.stack([one.tensor() for one in keys])
        numbers = torch.tensor(hyper, dtype=torch.float32)
        # A kernel cannot wait for other ranks.
        compiling = compiled if not self._groups and all(map(_compiles, self.codecs)) else eager
        run = compiling(make_step, *self.codecs, *([self._groups] if self._groups else []))
        run(p, g, self.owner, self.lengths, numbers.to(device), noise.to(device), *self.stored)
        if not self._in_place:
            pieces = [t.view(s.shape) for t, s in zip(p.view(-1).split(self._sizes), shards, strict=True)]
            torch._foreach_copy_(shards, pieces)


def _compiles(codec: StateCodec | None) -> bool:
    """Whether inductor's kernel has the bits of the definition: it misreads tiles of several blocks, and its
    logarithm is another one."""
    return codec is None or (max(codec.hadamard, codec.tile) <= BLOCK and codec.map != "log2")


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """float32 (blocks, 16) of all of them."""
    flat = tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])
    return flat.float().view(-1, BLOCK)
