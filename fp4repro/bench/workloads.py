"""What the core benchmark times: quantisers, one linear, one training step, and what each is held to.

The quantisers write a fresh output each; `copy_` into a kept buffer is the unit. The linear and the
training step run under the whole NVFP4 recipe beside the same thing in BF16; their weights count as
changed before each call, as after an optimiser's step, so that they are quantised anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

import fp4repro
from fp4repro import NVFP4, KeepBF16, QuantLinear, RandomKey, fake_quantize
from fp4repro.config import MODELS
from fp4repro.core.compiled import compiled, without_compiler
from fp4repro.core.kernels import make_amax
from fp4repro.core.quantize import prepare
from fp4repro.layers.operands import Slot
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.optim import adamw
from fp4repro.train.held import saved_by

Workload = Callable[[], object]

COPY, CLONE = "copy", "clone"
NEAREST = "fake-quantize-1x16-nearest"
LINEAR_BF16, LINEAR_NVFP4 = "linear-bf16", "linear-nvfp4"
STEP_BF16, STEP_NVFP4 = "training-step-bf16", "training-step-nvfp4"

GPU_COPY, GPU_AMAX, GPU_APPLY = "gpu-copy", "gpu-amax-pass", "gpu-apply-pass"

SEED = 0
RECIPE = "nvfp4"


@dataclass(frozen=True)
class Sizes:
    """matrix: rows and columns; linear: tokens, in and out features; step: sequences and tokens."""

    matrix: int = 4096
    tokens: int = 2048
    features: int = 1024
    batch: int = 8
    context: int = 128


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def quantisers(x: Tensor) -> dict[str, Workload]:
    """float32 x (rows, columns)."""
    kept = torch.empty_like(x)
    key = RandomKey(SEED, step=1)
    tile = NVFP4.with_block(16, 16)
    gradient = Slot.of(fp4repro.recipe(RECIPE), "dy_wgrad")

    def eager() -> Tensor:
        with without_compiler():
            return fake_quantize(x, NVFP4)

    return {
        COPY: lambda: kept.copy_(x),
        CLONE: lambda: x.clone(),
        NEAREST: lambda: fake_quantize(x, NVFP4),
        "fake-quantize-16x16-nearest": lambda: fake_quantize(x, tile),
        "fake-quantize-1x16-stochastic": lambda: fake_quantize(x, NVFP4, "stochastic", key),
        "hadamard-tokens-stochastic": lambda: gradient.operand(x, key),
        "fake-quantize-eager": eager,
    }


def on_gpu(x: Tensor) -> dict[str, Workload]:
    """The two large passes of nearest 1x16 beside a copy on a CUDA device; nothing where there is none."""
    if not torch.cuda.is_available():
        return {}
    there = x.cuda()
    kept, prepared = torch.empty_like(there), prepare(there, NVFP4)
    view = prepared.blocks.for_amax(prepared.matrix)

    def waited(run: Workload) -> Workload:
        return lambda: (run(), torch.cuda.synchronize())

    return {
        GPU_COPY: waited(lambda: kept.copy_(there)),
        GPU_AMAX: waited(lambda: compiled(make_amax, *NVFP4.block)(view)),
        GPU_APPLY: waited(lambda: prepared.apply("fake", "nearest", None, 0)),
    }


def _converted_linear(features: int) -> nn.Linear:
    model = nn.Sequential(_linear(features))
    recipe = fp4repro.recipe(RECIPE).replace(keep=KeepBF16())
    fp4repro.convert(model, recipe, seed=SEED)
    fp4repro.set_step(model, 1)
    return model[0]


def _linear(features: int) -> nn.Linear:
    layer = nn.Linear(features, features, bias=False, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.normal_(0, features**-0.5, generator=generator())
    return layer


def linears(sizes: Sizes) -> dict[str, Workload]:
    """Forward and backward of a square linear, parameters and tokens in BF16."""
    draw = generator()
    x = torch.randn(sizes.tokens, sizes.features, generator=draw).bfloat16().requires_grad_()
    dy = torch.randn(sizes.tokens, sizes.features, generator=draw).bfloat16()

    def workload(layer: nn.Linear) -> Workload:
        layer.bfloat16()

        def run() -> None:
            increment_version(layer.weight)
            x.grad = layer.weight.grad = None
            layer(x).backward(dy)

        return run

    return {
        LINEAR_BF16: workload(_linear(sizes.features)),
        LINEAR_NVFP4: workload(_converted_linear(sizes.features)),
    }


def training_steps(sizes: Sizes) -> dict[str, Workload]:
    """One whole step of the tiny hybrid: forward, backward, clipping and AdamW."""
    config = ModelConfig.from_yaml(MODELS / "tiny.yaml")
    shape = (2, sizes.batch, sizes.context)
    tokens, targets = torch.randint(config.vocabulary, shape, generator=generator())

    def workload(recipe: str) -> Workload:
        model = HybridModel(config, generator=generator())
        fp4repro.convert(model, fp4repro.recipe(recipe), seed=SEED)
        optimizer = adamw(model, 1e-3, (0.9, 0.95), 1e-8, 0.1)
        done = [0]

        def run() -> None:
            done[0] += 1
            fp4repro.set_step(model, done[0])
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return run

    return {STEP_BF16: workload("bf16"), STEP_NVFP4: workload(RECIPE)}


def saved_bytes(sizes: Sizes) -> dict[str, int]:
    """What waits for the backward of a linear with float32 parameters under BF16 autocast: all that
    autograd saves, and W as the layer multiplies it, but not the parameter itself."""
    x = torch.randn(sizes.tokens, sizes.features, generator=generator()).bfloat16().requires_grad_()
    found = {}
    for name, layer in (
        (LINEAR_BF16, _linear(sizes.features)),
        (LINEAR_NVFP4, _converted_linear(sizes.features)),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            found[name] = saved_by(lambda layer=layer: layer(x), [layer.weight])
        if isinstance(layer, QuantLinear):  # kept by the layer, for forward and backward
            found[name] += layer.quantised_weight("w_dgrad").nbytes
    return found
