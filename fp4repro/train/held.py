"""Bytes that training holds beside the model: the optimizer's states, and what a forward pass saves."""

from collections.abc import Callable, Sequence

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


def saved_bytes(model: nn.Module, tokens: Sequence[Tensor] | Tensor, device: str) -> int:
    """Of distinct storages that one forward pass saves, the parameters' own left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []  # a freed storage's address could come again

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return t

    unpack: Callable = lambda t: t  # noqa: E731
    with without_compiler(), saved_tensors_hooks(keep, unpack), torch.autocast(device, torch.bfloat16):
        model(*tokens)
    return sum(kept.values())
