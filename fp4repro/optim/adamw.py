"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) with FP32 master weights and FP32 states.

The numerics are torch's own; what is decided here is which parameters decay. The NVFP4 paper states
a weight decay of 0.1 and not of what: it is taken to mean the weights that multiply activations,
those of two or more dimensions. Embeddings are looked up, not multiplied, and norms, biases and
the Mamba-2 vectors (A, D, dt) have one dimension: none of these decays.
"""

import torch
from torch import nn

from fp4repro.errors import Fp4ReproError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups for an optimiser, decaying first; parameters in the model's order within each."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decaying, kept = [], []
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise Fp4ReproError(
                f"parameter {name} is {parameter.dtype}, but master weights are float32: leave the "
                "model in float32 and let autocast choose the precision of its products"
            )
        decays = parameter.ndim >= 2 and id(parameter) not in embeddings
        (decaying if decays else kept).append(parameter)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """The optimiser of a model's parameters, in torch's fused form, which a CPU has too."""
    groups = parameter_groups(model, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)
