"""The optimizer's benchmark: a step with 4-bit states beside torch's fused AdamW in FP32, and their bytes.

In interleaved rounds of one run, on one large matrix and on the parameters of a model. The fused step is
bound by memory (28 bytes a parameter), the 4-bit one by arithmetic; a small model's states lie in the
processor's cache, where the first is three times as fast as from memory and the second is not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp4repro.bench.core import Bar, Measured
from fp4repro.bench.timing import Ratio, interleaved, ratio
from fp4repro.bench.workloads import generator
from fp4repro.config import MODELS
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.optim import NVFP4AdamW
from fp4repro.optim.nvfp4_adamw import why_fp32
from fp4repro.optim.rivals import RIVALS, rival_class
from fp4repro.recipes.optimizer import NVFP4_ADAMW

EXPERIMENT = "bench_optimizer"
FP32, OURS = "adamw-fp32-fused", "adamw-nvfp4"
TO_FP32, TO_OURS, BYTES = "ratio_to_fused_fp32", "ratio_to_nvfp4", "state_bytes_per_parameter"
MATRIX, HYBRID = "matrix", "tiny-hybrid"
OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Sizes:
    """Sides of the matrix."""

    matrix: int = 4096


# The project's bound is 2.5 times a fused step, and 10.1 bits for both moments.
BARS = tuple(
    Bar(f"{name}/{where}", f"{name}, {where}: {what}", f"{against}/{where}", metric, bound, at_least)
    for where in (MATRIX, HYBRID)
    for name, what, against, metric, bound, at_least in (
        (OURS, "step over fused FP32", FP32, TO_FP32, 2.5, False),
        (OURS, "bytes of coded states a parameter", "", BYTES, 10.1 / 8, False),
        *(
            row
            for rival in RIVALS
            for row in (
                (rival, "step over ours", OURS, TO_OURS, 1.0, True),
                (rival, "bytes of states a parameter", "", BYTES, 10.1 / 8, True),
            )
        ),
    )
)


def parameters(where: str, sizes: Sizes) -> list[nn.Parameter]:
    """With gradients; the model's those that have coded states, which alone are compared."""
    if where == MATRIX:
        params = [nn.Parameter(torch.randn(sizes.matrix, sizes.matrix, generator=generator()))]
    else:
        model = HybridModel(ModelConfig.from_yaml(MODELS / "tiny.yaml"), generator=generator())
        codecs = NVFP4_ADAMW.first, NVFP4_ADAMW.second
        params = [p for p in model.parameters() if not why_fp32(p, codecs)]
    for p in params:
        p.grad = 1e-3 * torch.randn(p.shape, generator=generator())
    return params


def optimizers(where: str, sizes: Sizes) -> tuple[dict[str, torch.optim.Optimizer], dict[str, str]]:
    """Each over parameters of its own, by the bars' names; and why some are missing."""
    found: dict[str, torch.optim.Optimizer] = {}
    missing = {}
    makers: dict[str, Callable | None] = {
        FP32: lambda params: torch.optim.AdamW(params, fused=True, **OPTIONS),
        OURS: lambda params: NVFP4AdamW(params, **OPTIONS),
    }
    for name in RIVALS:
        kind, missing[f"{name}/{where}"] = rival_class(name)
        makers[name] = kind and (lambda params, kind=kind: kind(params, **OPTIONS))
    for name, make in makers.items():
        if make is None:
            continue
        try:
            optimizer = make(parameters(where, sizes))
            optimizer.step()  # a rival may fail under this torch
            found[f"{name}/{where}"] = optimizer
        except Exception as error:
            if name not in RIVALS:
                raise
            missing[f"{name}/{where}"] = f"{name} failed: {type(error).__name__}"
    return found, missing


def measure(sizes: Sizes, rounds: int) -> list[Measured]:
    """Every bar, in the table's order."""
    measured = []
    for where in (MATRIX, HYBRID):
        found, missing = optimizers(where, sizes)
        timings = interleaved({name: optimizer.step for name, optimizer in found.items()}, rounds)
        for bar in BARS:
            if not bar.setting.endswith(f"/{where}"):
                continue
            if bar.setting not in found:
                measured.append(Measured(bar, None, why_not=missing[bar.setting]))
            elif bar.metric == BYTES:
                value = state_bytes(found[bar.setting])
                measured.append(Measured(bar, Ratio(value, value, value)))
            else:
                timing = timings[bar.setting]
                measured.append(Measured(bar, ratio(timing, timings[bar.against]), timing.best))
    return measured


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of all that the states hold, step counts aside, a parameter."""
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
        for t in _plain(value)
    }
    return sum(storages.values()) / count


def _plain(value: object) -> Iterator[Tensor]:
    """The tensors in a state: as they are, in a dict, or inside a tensor of a library's own type."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _plain(each)
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


def conditions(sizes: Sizes, threads: int, rounds: int) -> str:
    """How the figures were taken, for the notes."""
    return (
        f"matrix {sizes.matrix} x {sizes.matrix}, and the coded parameters of the tiny hybrid; {threads} "
        f"threads; best of {rounds} interleaved rounds"
    )
