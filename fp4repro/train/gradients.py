"""In what type a step's gradients are summed: over its micro-batches, and over ranks.

FP32, or BF16, whose sums take half the memory and half the bytes between ranks. In BF16 each micro-batch's
gradient is rounded once and each sum once; clipping and the optimizer get FP32 again. All sums are plain
ones, in place of DDP's and FSDP2's mean: micro-batches are weighed before.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

Pending = torch.futures.Future[Tensor]


def sum_in_bf16(model: nn.Module) -> None:
    """Let autograd sum every parameter's gradient in BF16 from now on."""
    for parameter in model.parameters():
        parameter.grad_dtype = torch.bfloat16


def as_fp32(model: nn.Module) -> None:
    """The summed gradients for the optimizer; the next backward pass begins BF16 sums anew."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.float()
            parameter.grad, parameter.grad_dtype = None, None
            parameter.grad = gradient


def summed(_: None, bucket: dist.GradBucket) -> Pending:
    """DDP's communication hook."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def summed_in_bf16(_: None, bucket: dist.GradBucket) -> Pending:
    whole = bucket.buffer()

    def back(done: Pending) -> Tensor:
        return whole.copy_(done.value()[0])

    return dist.all_reduce(whole.bfloat16(), async_op=True).get_future().then(back)
