"""Sharded parameters (FSDP2's DTensor): a rank's own part, and what is known of the whole.

Parameters cut along their first axis keep their rows, and so their tiles, whole; with an amax that is the
largest of all ranks a shard's states are the bits of an unsharded parameter's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def local(t: Tensor) -> Tensor:
    """The rank's own shard of a distributed tensor; any other as it is. Without a gradient."""
    return (t.to_local() if hasattr(t, "to_local") else t).detach()


def sharded_axes(t: Tensor) -> tuple[int, ...]:
    """Axes of the tensor that are cut, one entry for each dimension of the mesh that cuts."""
    return tuple(p.dim for p in getattr(t, "placements", ()) if p.is_shard())


def groups_of(t: Tensor) -> tuple:
    """Process groups that together hold the whole tensor; none where it is not sharded."""
    placements = getattr(t, "placements", ())
    return tuple(t.device_mesh.get_group(i) for i, p in enumerate(placements) if p.is_shard())


def number_of(groups: Sequence) -> int:
    """Which part of a tensor that these groups hold is the rank's; 0 where there are none."""
    number = 0
    for group in groups:
        number = number * group.size() + group.rank()
    return number


def largest_of(amax: Tensor, groups: Sequence) -> Tensor:
    """Elementwise maximum of the ranks' amax, float32; as integers, among which a NaN is the largest."""
    if not groups:
        return amax
    words = amax.view(torch.int32)
    for group in groups:
        torch.distributed.all_reduce(words, torch.distributed.ReduceOp.MAX, group)
    return words.view(torch.float32)


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which each rank has a `part`, cut as `like` is."""
    if not hasattr(like, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    mesh, places = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, places, shape=like.shape, stride=like.stride()).full_tensor()


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The rank's part of what every rank has, cut as `like` is."""
    if not hasattr(like, "placements"):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=like.placements).to_local()
