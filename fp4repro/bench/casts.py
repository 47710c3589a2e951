"""How fast operands are quantised, beside a copy: gigabytes a second of tensor read and operands written.

The BF16 tensor is counted once and the packed codes and scales once, whatever a kernel moves
in between; so the share of a copy's rate says how far the passes are from one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import fp4repro
from fp4repro import NVFP4, RandomKey, quantize
from fp4repro.bench.timing import HIGH, LOW, Timing, interleaved
from fp4repro.core.layout import transpose
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.layers.operands import Slot
from fp4repro.report.schema import Row

EXPERIMENT = "casts"
COPY = "copy"
SEED = 0
RECIPE = "nvfp4"


@dataclass(frozen=True)
class Cast:
    """One workload; `bytes` read and written by the definition above."""

    what: str
    run: Callable[[], object]
    bytes: int


def casts(size: int, device: torch.device) -> dict[str, Cast]:
    """Of a BF16 matrix (size, size), normal values."""
    draw = torch.Generator().manual_seed(SEED)
    x = torch.randn(size, size, generator=draw).bfloat16().to(device)
    kept, key, recipe = torch.empty_like(x), RandomKey(SEED, step=1), fp4repro.recipe(RECIPE)
    x_slots = [Slot.of(recipe, name) for name in ("x_fprop", "x_wgrad")]
    dy = Slot.of(recipe, "dy_wgrad")

    def both() -> list[QuantizedTensor]:
        """x as fprop and as wgrad take it, the latter really transposed, as hardware wants it."""
        first, second = (slot.store(x, key) for slot in x_slots)
        return [first, transpose(second)]

    workloads = {
        "quantise 1x16": lambda: quantize(x, NVFP4),
        "quantise 16x16": lambda: quantize(x, NVFP4.with_block(16, 16)),
        "quantise 1x16, stochastic": lambda: quantize(x, NVFP4, "stochastic", key),
        "RHT + stochastic, along tokens": lambda: dy.store(x, key),
        "both orientations of x, transposed": both,
    }
    found = {COPY: Cast(COPY, lambda: kept.copy_(x), 2 * x.nbytes)}
    for what, run in workloads.items():
        found[what] = Cast(what, run, x.nbytes + _stored(run()))
    return found


def _stored(result: QuantizedTensor | Sequence[QuantizedTensor]) -> int:
    results = [result] if isinstance(result, QuantizedTensor) else result
    return sum(q.nbytes for q in results)


def measure(found: Mapping[str, Cast], rounds: int, seconds_of: Callable | None = None) -> dict[str, Timing]:
    functions = {name: cast.run for name, cast in found.items()}
    return interleaved(functions, rounds, *([seconds_of] if seconds_of else []))


def rows(
    found: Mapping[str, Cast], timings: Mapping[str, Timing], note: str, where: dict[str, str]
) -> Iterator[Row]:
    """Times, rates and shares of the copy's rate; on a machine that others use too the minimum counts."""
    copy = found[COPY].bytes / timings[COPY].best
    for name, cast in found.items():
        timing = timings[name]
        _, low, high = timing.spread
        common = {"experiment": EXPERIMENT, "setting": name, "n": 1, "note": note, **where}
        interval = {"ci_low": 1e3 * low, "ci_high": 1e3 * high}
        yield Row(metric="time", value=1e3 * timing.best, unit="ms", **interval, **common)
        yield Row(metric="rate", value=cast.bytes / timing.best / 1e9, unit="GB/s", **common)
        if name != COPY:
            share = cast.bytes / timing.best / copy
            yield Row(metric="share_of_copy", value=share, unit="1", **common)


def conditions(size: int, rounds: int, device: torch.device) -> str:
    where = "on a CPU, emulated" if device.type == "cpu" else "on the GPU"
    return f"{size} x {size} values in BF16, {where}; best of {rounds} rounds, {LOW}th to {HIGH}th percentile"
