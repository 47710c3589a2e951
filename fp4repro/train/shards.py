"""FSDP2 (torch's `fully_shard`): a rank keeps its rows of each parameter, gradient and optimizer state.

A block's weights are gathered in FP32 before it runs and quantised then, whole: amax is the whole tensor's
without an all-reduce, 16x16 tiles straddle no shards, and codes are those of one rank. Every rank quantises
all weights, as with DDP; the price is an all-gather of 32 bits a value where codes have 4.5.
Reduce-scatter is set to a plain sum. The gradient norm is summed in FP64 from the shards and rounded once,
so that it is the same on any number of ranks (but for one step in some ten million, where FP64's own
rounding decides), and with it the clipped gradients: torch's FP32 norm depends on the sharding in its
seventh digit.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4repro
from fp4repro.config import Training
from fp4repro.errors import Fp4ReproError
from fp4repro.layers import QuantLinear
from fp4repro.optim.shards import local


def check(recipe: fp4repro.Recipe, branching: bool) -> None:
    """Refuse what must see whole weights at the start, on one rank as on many."""
    if recipe.lora_svd is not None and recipe.lora_svd.trainable_factors:
        what = "trainable LoRA factors, which are split from whole weights"
    elif branching:
        what = "trunks and branches, which are kept in one file"
    else:
        return
    raise Fp4ReproError(
        f"training.parallel is fsdp, but recipe {recipe.name} has {what}: set it to ddp in the scale file"
    )


def shard(model: nn.Module, device: torch.device, training: Training) -> None:
    """Shard every block of `model`, and what is left as one more group, over all ranks."""
    # Imported where it is used: it takes seconds.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if training.gradients == "bf16" else None)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def gradient_norm(parameters: Sequence[nn.Parameter], total: Callable[[Tensor], Tensor]) -> Tensor:
    """FP32 norm of all gradients; `total` sums over ranks."""
    parts = [local(p.grad) for p in parameters if p.grad is not None]
    norms = torch._foreach_norm([part for part in parts if part.numel()], 2, dtype=torch.float64)
    return total(torch.stack(norms).square().sum()).sqrt().float()


def requantise_after_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """FSDP gathers new values into the storage and version of the old ones, which a GPU layer that asks
    whether its weight has changed could not tell apart before the next step."""

    def forget(*_: object) -> None:
        for module in model.modules():
            if isinstance(module, QuantLinear):
                module.forget_quantised()

    optimizer.register_step_post_hook(forget)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's `state_dict` with whole tensors on the CPU; all ranks must ask, and only rank 0 gets it."""
    state = {}
    for name, tensor in model.state_dict().items():  # one tensor at a time is whole on every rank
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if dist.get_rank() == 0:
            state[name] = whole.cpu()
    return state
