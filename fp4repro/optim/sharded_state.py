"""Coded optimizer states as torch.distributed.checkpoint saves them and reads them on any number of ranks.

A parameter of n rows has fields of n rows, so a rank's part of a field is cut as its part of the parameter is
and is shown as a distributed tensor of the whole. All of them share the optimizer's own storage: a checkpoint
is read into it in place. Plain numbers (steps, guard hits) are values, to be handed back by `take_numbers`.
"""

from typing import Any

from torch import Tensor

from fp4repro.optim.nvfp4_adamw import NVFP4AdamW
from fp4repro.optim.shards import local

GUARD_HITS = "guard_hits"


def sharded_state(optimizer: NVFP4AdamW) -> dict[str, Any]:
    """The state of every parameter by its name; of those that have none yet, the one before a first step."""
    optimizer.begin()
    states: dict[str, Any] = {}
    for name, p in optimizer.named():
        states[name] = {
            entry: {field: _whole(t, p, optimizer.row(p, entry, field)) for field, t in value.items()}
            if isinstance(value, dict)
            else value
            for entry, value in optimizer.state[p].items()
        }
    return {"states": states, GUARD_HITS: getattr(optimizer, GUARD_HITS, 0)}


def take_numbers(optimizer: NVFP4AdamW, loaded: dict[str, Any]) -> None:
    """The other half of reading: what is no tensor in a `sharded_state` that has been read into."""
    for name, p in optimizer.named():
        for entry, value in loaded["states"][name].items():
            if isinstance(value, int | float):
                optimizer.state[p][entry] = value
    if hasattr(optimizer, GUARD_HITS):
        optimizer.guard_hits = loaded[GUARD_HITS]
    optimizer.forget_buckets()


def _whole(field: Tensor, p: Tensor, width: int) -> Tensor:
    """A rank's part of a field, with a row for each of the parameter's; amax (width 0) as it is."""
    if not width:
        return field
    part = field.view(local(p).shape[0], width)
    if not hasattr(p, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=(p.shape[0], width), stride=(width, 1)
    )
