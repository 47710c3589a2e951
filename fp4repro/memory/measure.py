"""What a training step really holds: saved tensors by hooks, and live memory by its storages.

`LiveBytes` is a dispatch mode: every operator's outputs pass it, and a storage counts from the operator
that made it until it is freed (a weak reference tells). It sees what torch allocates for tensors, on
any device, and neither the allocator's rounding nor what a kernel takes for itself. On a GPU the
allocator's own peak is read beside it.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp4repro
from fp4repro.core.compiled import without_compiler
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.optim import adamw
from fp4repro.recipes import Recipe
from fp4repro.train.held import saved_bytes

SEED = 0


class LiveBytes(TorchDispatchMode):
    """Bytes of live storages that operators made while the mode is on: `now` and `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and id(t.untyped_storage()) not in inputs:
                self._add(t.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._known:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            self._known[key] = weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, nbytes: int) -> None:
        del self._known[key]
        self.now -= nbytes


@dataclass(frozen=True)
class Measured:
    """Bytes in the second step: `parameters` themselves, all that lives at the end of the forward pass,
    and the highest of the step, all with the parameters; `saved`: what hooks saw go to the backward;
    `allocator`: the CUDA allocator's own peak, None on a CPU."""

    parameters: int
    after_forward: int
    peak: int
    saved: int
    allocator: int | None = None


def measure(config: ModelConfig, recipe: Recipe, batch: int, context: int, device: str = "cpu") -> Measured:
    """Two training steps with AdamW, as in `fp4repro.train`, gradients kept between them; without the
    compiler, whose kernels would hide their outputs from the mode."""
    generator = torch.Generator().manual_seed(SEED)
    model = HybridModel(config, generator=generator)
    fp4repro.convert(model, recipe, seed=SEED)
    model.to(device)
    optimizer = adamw(model, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    tokens = torch.randint(config.vocabulary, (2, batch, context), generator=generator).to(device)
    parameters = sum(p.nbytes for p in model.parameters())
    # In small pieces: what the emulation itself works with is no part of a step's memory.
    with without_compiler(chunk=1 << 12), LiveBytes() as live:
        for step in range(2):
            fp4repro.set_step(model, step)
            optimizer.zero_grad(set_to_none=False)
            live.peak = live.now
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with torch.autocast(device, torch.bfloat16):
                loss = model(*tokens)
            after_forward = live.now
            loss.backward()
            optimizer.step()
            del loss
        peak = live.peak
    allocator = torch.cuda.max_memory_allocated() if device == "cuda" else None
    saved = saved_bytes(model, tokens, device)
    return Measured(parameters, parameters + after_forward, parameters + peak, saved, allocator)
