"""Bytes that training holds beside the model: the optimizer's states, and what a forward pass saves."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from fp4repro.core.compiled import without_compiler
from fp4repro.optim.shards import local


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the tensors in an optimizer's state, packed as they are stored; of shards, this rank's."""
    states = [value for state in optimizer.state.values() for value in tree_leaves(dict(state))]
    return sum(local(t).nbytes for t in states if isinstance(t, Tensor))


def saved_by(forward: Callable[[], object], own: Iterable[Tensor] = ()) -> int:
    """Bytes of distinct storages that autograd saves in `forward`, those of the tensors `own` left out."""
    apart = {t.untyped_storage().data_ptr() for t in own}
    kept: dict[int, int] = {}
    alive = []  # a freed storage's address could come again

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        alive.append(forward())
    return sum(kept.values())


def saved_bytes(model: nn.Module, tokens: Sequence[Tensor] | Tensor, device: str) -> int:
    """Those of a model's forward pass, without its parameters."""
    with without_compiler(), torch.autocast(device, torch.bfloat16):
        return saved_by(lambda: model(*tokens), model.parameters())
