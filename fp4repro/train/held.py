"""Bytes that training holds beside the model: the optimizer's states, and what a forward pass saves."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fp4repro.core.compiled import without_compiler


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the tensors in an optimizer's state, packed ones as they are stored."""
    states = [value for state in optimizer.state.values() for value in tree_leaves(dict(state))]
    own = [t.to_local() if isinstance(t, DTensor) else t for t in states if isinstance(t, Tensor)]
    return sum(t.nbytes for t in own)


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
