"""Attention's benchmark: time and memory beside torch's `scaled_dot_product_attention` in BF16.

Forward and backward, causal, in interleaved rounds of one run. Memory is the most that torch's
allocator held at once, inputs and gradients included, as its profiler counts it; what waits for the
backward is counted by storage, the output with it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4repro import AttentionRecipe, RandomKey, fp4_attention
from fp4repro.bench.core import TO_BF16, Bar, Measured
from fp4repro.bench.timing import Ratio, interleaved, ratio
from fp4repro.train.held import saved_by

EXPERIMENT = "bench_attention"
SDPA = "sdpa-bf16"
PEAK, SAVED = "peak_bytes_ratio_to_bf16", "saved_bytes_ratio_to_bf16"
SEED = 0


@dataclass(frozen=True)
class Sizes:
    """Of q; k and v have `kv_heads`."""

    batch: int = 4
    heads: int = 8
    kv_heads: int = 8
    length: int = 512
    head_dim: int = 64


RECIPES = {
    "full-stack": AttentionRecipe(),
    "full-stack-requant": AttentionRecipe(reuse="requant"),
    "full-stack-stochastic": AttentionRecipe(ds_rounding="stochastic"),
    "full-stack-smooth": AttentionRecipe(smooth=("k", "v")),
    "full-stack-row-p": AttentionRecipe(row_term="p"),
    "not-quantised": AttentionRecipe(lowered=(), views=()),
}
# The project's bounds, 2 and 1.3, at 512 tokens; a saved byte may cost no more than torch's.
BARS = tuple(
    Bar(name, f"fp4_attention, {name}: {what}", SDPA, metric, bound)
    for metric, what, bound in (
        (TO_BF16, "forward and backward", 2.0),
        (PEAK, "peak memory", 1.3),
        (SAVED, "saved for backward", 1.0),
    )
    for name in (RECIPES if metric == TO_BF16 else ("full-stack", "full-stack-row-p"))
)


def attend(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The workload of that name, on BF16 tensors."""
    if name == SDPA:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return lambda q, k, v: fp4_attention(q, k, v, RECIPES[name], key=RandomKey(SEED))


def inputs(sizes: Sizes) -> list[Tensor]:
    """q, k, v that need gradients, and the output's gradient; BF16."""
    draw = torch.Generator().manual_seed(SEED)
    heads = sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads
    shapes = [(sizes.batch, h, sizes.length, sizes.head_dim) for h in heads]
    tensors = [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]
    return [*(t.requires_grad_() for t in tensors[:3]), tensors[3]]


def measure(sizes: Sizes, rounds: int) -> list[Measured]:
    """Every bar, in the table's order."""
    tensors = inputs(sizes)
    timings = interleaved({name: _round(name, tensors) for name in (SDPA, *RECIPES)}, rounds)
    counted = {PEAK: peak_bytes, SAVED: saved_bytes}
    measured = []
    for bar in BARS:
        if bar.metric == TO_BF16:
            timing = timings[bar.setting]
            measured.append(Measured(bar, ratio(timing, timings[bar.against]), timing.best))
        else:
            ours, theirs = (counted[bar.metric](name, sizes) for name in (bar.setting, bar.against))
            value = ours / theirs
            measured.append(Measured(bar, Ratio(value, value, value)))
    return measured


def _round(name: str, tensors: list[Tensor]) -> Callable[[], None]:
    *leaves, gradient = tensors
    function = attend(name)

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward(gradient)

    return run


def peak_bytes(name: str, sizes: Sizes) -> int:
    """Most bytes allocated at once by a forward and backward, its inputs among them."""
    _round(name, inputs(sizes))()  # what is compiled or cached at a first call does not count
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        _round(name, inputs(sizes))()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def saved_bytes(name: str, sizes: Sizes) -> int:
    """What autograd keeps between forward and backward."""
    *leaves, _ = inputs(sizes)
    return saved_by(lambda: attend(name)(*leaves))


def conditions(sizes: Sizes, threads: int, rounds: int) -> str:
    """How the figures were taken, for the notes."""
    return (
        f"batch {sizes.batch}, {sizes.heads} heads of {sizes.head_dim}, {sizes.kv_heads} of keys, "
        f"{sizes.length} tokens, causal, BF16; {threads} threads; best of {rounds} interleaved rounds"
    )
