"""In what type a step's gradients are summed: over its micro-batches, and over ranks.

FP32, by autograd and DDP; or BF16, whose sums take half the memory and half the bytes between ranks: each
micro-batch's gradient is rounded once and each sum once, and clipping and the optimizer get FP32 again.
Sums over ranks are plain ones, not DDP's mean: micro-batches are weighed before. Shards have FSDP2's own way
(`shards`), in which autograd sums in FP32 what is rounded when it joins the sum of a step.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def summed(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def sum_in_bf16(model: nn.Module) -> None:
    """Let autograd sum every parameter's gradient in BF16 from now on."""
    for parameter in model.parameters():
        parameter.grad_dtype = torch.bfloat16


def as_fp32(model: nn.Module, total: Callable[[Tensor], Tensor]) -> None:
    """Sums over ranks, by one call of `total`, and gives the optimizer FP32."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    whole = total(torch.cat([p.grad.view(-1) for p in parameters]))
    for parameter, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
        parameter.grad, parameter.grad_dtype = None, None
        parameter.grad = part.view(parameter.shape).float()
