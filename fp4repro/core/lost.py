"""What the quantisation of one matrix loses: values flushed to zero or clipped, blocks by their scales."""

from collections import Counter

import torch
from torch import Tensor

from fp4repro.core.kernels import make_amax
from fp4repro.core.quantize import Prepared

# What FP32 arithmetic may add to a bound that is met exactly, a few units in the last place.
SLACK = 1 + 2.0**-20


def lost(prepared: Prepared, x: Tensor, got: Tensor) -> Counter[str]:
    """Counts over `x` (rows, columns), quantised as `prepared` says to `got`.

    values, kept        all, and those that are not zero
    flushed             of those kept, the ones that became zero
    clipped             above the element's maximum after scaling, in blocks with a scale
    blocks              with a value that is not zero
    zero_scales         of those blocks, the ones whose decode scale is zero, so that all is lost
    subnormal_scales    and whose decode scale is subnormal in its type, so that it is coarse
    """
    blocks, kept = prepared.blocks, x != 0
    s = blocks.spread(prepared.s)
    scaled = (blocks.view(prepared.matrix).float() * blocks.spread(prepared.e)).abs()
    held = make_amax(*prepared.format.block)(blocks.for_amax(prepared.matrix)).reshape(-1) > 0
    scales = prepared.s.reshape(-1)
    smallest = prepared.format.scale.min_normal
    counts = {
        "values": torch.tensor(x.numel()),
        "kept": kept.sum(),
        "flushed": (kept & (got == 0)).sum(),
        "clipped": ((scaled > prepared.format.element.max * SLACK) & (s > 0)).sum(),
        "blocks": held.sum(),
        "zero_scales": (held & (scales == 0)).sum(),
        "subnormal_scales": (held & (scales > 0) & (scales < smallest)).sum(),
    }
    return Counter({name: int(count) for name, count in counts.items()})
