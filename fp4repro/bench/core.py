"""The core's benchmark: each figure beside the bound that the project sets itself.

All ratios of a group come from the same interleaved rounds. With glibc's defaults the pages of a
fresh 64 MiB output are faulted in, ten times the cost of a copy, so freed memory is kept in the process
(`fp4repro.train.memory`) and touched once before; a control row shows that it worked. Bounds hold for
4096 x 4096 values, a 2048 x 1024 x 1024 linear and two threads on a machine of the class of a Zen 4
server; the limits are what memory traffic or the format alone would allow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fp4repro.bench.rivals import RIVALS, rival
from fp4repro.bench.timing import HIGH, LOW, Ratio, Timing, interleaved, ratio
from fp4repro.bench.workloads import (
    CLONE,
    COPY,
    GPU_AMAX,
    GPU_APPLY,
    GPU_COPY,
    LINEAR_BF16,
    LINEAR_NVFP4,
    NEAREST,
    STEP_BF16,
    STEP_NVFP4,
    Sizes,
    generator,
    linears,
    on_gpu,
    quantisers,
    saved_bytes,
    training_steps,
)
from fp4repro.core.compiled import compiler_usable
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import NOT_RUN, Row

EXPERIMENT = "bench_core"
UNIT = "x"
TO_COPY, TO_BF16, TO_OURS = "ratio_to_copy", "ratio_to_bf16", "ratio_to_fake_quantize"
SAVED = "saved_bytes_ratio_to_bf16"

# A pass takes at least its bytes' share of a copy's time, which moves 8 an element: amax reads 4 and
# writes 4 a block, apply moves 8 and reads 8 a block. Beyond 1 / 0.8 of it a fifth of the bandwidth is
# unused, and a kernel by hand would be worth writing.
AMAX_LIMIT, APPLY_LIMIT = (4 + 4 / 16) / 8, (8 + 8 / 16) / 8
TOUCHED = 8  # times the matrix's bytes


@dataclass(frozen=True)
class Bar:
    """One row: the workload `setting` over the workload `against`, and what it is held to."""

    setting: str
    what: str
    against: str
    metric: str
    bound: float
    at_least: bool = False  # for rivals, which are to take longer
    limit: float | None = None

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


BARS = (
    Bar(CLONE, "control: clone(), a fresh output each time", COPY, TO_COPY, 1.3, limit=1.0),
    Bar(NEAREST, "fake_quantize 1x16, nearest, float32", COPY, TO_COPY, 2.2, limit=1.45),
    Bar(
        "fake-quantize-16x16-nearest",
        "fake_quantize 16x16, nearest, float32",
        COPY,
        TO_COPY,
        1.6,
        limit=1.45,
    ),
    Bar("fake-quantize-1x16-stochastic", "fake_quantize 1x16, stochastic, float32", COPY, TO_COPY, 2.8),
    Bar("hadamard-tokens-stochastic", "RHT along tokens + stochastic, float32", COPY, TO_COPY, 4.5),
    Bar("fake-quantize-eager", "no compiler: 1x16, nearest, float32", COPY, TO_COPY, 13.0),
    Bar(
        LINEAR_NVFP4,
        "emulated linear, whole recipe, forward and backward, BF16",
        LINEAR_BF16,
        TO_BF16,
        1.3,
        limit=1.0,
    ),
    Bar(STEP_NVFP4, "tiny hybrid, training step, whole recipe", STEP_BF16, TO_BF16, 1.5),
    Bar("saved-for-backward", "memory that a linear saves for backward", "", SAVED, 0.30, limit=0.28),
    *(
        Bar(
            name,
            f"GPU: {what}; the bound uses 80 % of a copy's bandwidth",
            GPU_COPY,
            TO_COPY,
            bound,
            limit=limit,
        )
        for name, what, bound, limit in (
            (GPU_AMAX, "amax pass of 1x16", 0.66, AMAX_LIMIT),
            (GPU_APPLY, "apply pass of 1x16", 1.33, APPLY_LIMIT),
        )
    ),
    *(
        Bar(name, f"{name}, compiled, against fake_quantize 1x16", NEAREST, TO_OURS, bound, at_least=True)
        for name, bound in (("compressed-tensors", 4.0), ("torchao", 10.0))
    ),
)


@dataclass(frozen=True)
class Measured:
    """A bar with what came of it: a ratio and seconds, or why there is none."""

    bar: Bar
    ratio: Ratio | None
    seconds: float | None = None
    why_not: str = ""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return NOT_RUN + self.why_not
        return "met" if self.bar.met(self.ratio.value) else "not met"


def measure(sizes: Sizes, rounds: int, rivals: Sequence[str] = tuple(RIVALS)) -> list[Measured]:
    """Every bar, in the table's order. `rivals` are tried; the others' rows say that they were not."""
    x = torch.randn(sizes.matrix, sizes.matrix, generator=generator())
    torch.empty(TOUCHED * x.nbytes, dtype=torch.uint8).fill_(0)  # pages for all that comes
    group, missing = quantisers(x), {}
    for name in RIVALS:
        run, missing[name] = rival(name, x) if name in rivals else (None, f"{name} was not asked for")
        if run is not None:
            group[name] = run
    gpu = on_gpu(x)
    missing |= {} if gpu else dict.fromkeys((GPU_AMAX, GPU_APPLY), "no CUDA device")
    timings: dict[str, Timing] = {}
    for functions in (group, gpu, linears(sizes), training_steps(sizes)):
        timings |= interleaved(functions, rounds)
    return [_of_bar(bar, timings, missing, sizes) for bar in BARS]


def _of_bar(bar: Bar, timings: dict[str, Timing], missing: dict[str, str], sizes: Sizes) -> Measured:
    if bar.metric == SAVED:
        nbytes = saved_bytes(sizes)
        value = nbytes[LINEAR_NVFP4] / nbytes[LINEAR_BF16]
        return Measured(bar, Ratio(value, value, value))
    if bar.setting not in timings:
        return Measured(bar, None, why_not=missing[bar.setting])
    timing = timings[bar.setting]
    return Measured(bar, ratio(timing, timings[bar.against]), timing.best)


def rows(
    measured: Sequence[Measured], conditions: str, where: dict[str, str], experiment: str = EXPERIMENT
) -> Iterator[Row]:
    """Results rows: each ratio, and the milliseconds behind it. `where`: the shared columns."""
    for m in measured:
        common = {"experiment": experiment, "setting": m.bar.setting, "n": 1, **where}
        bound = f"{'at least' if m.bar.at_least else 'at most'} {m.bar.bound:g}: {m.verdict}"
        if m.ratio is None:
            note = f"{m.verdict}; bound {bound.partition(':')[0]}"
            yield Row(metric=m.bar.metric, value=None, unit=UNIT, note=note, **common)
            continue
        interval = f"interval: {LOW}th to {HIGH}th percentile of the rounds"
        yield Row(
            metric=m.bar.metric,
            value=m.ratio.value,
            unit=UNIT,
            ci_low=m.ratio.low,
            ci_high=m.ratio.high,
            note=f"{bound}; {interval}; {conditions}" if m.seconds else f"{bound}; {conditions}",
            **common,
        )
        if m.seconds:
            yield Row(metric="best_time", value=1e3 * m.seconds, unit="ms", note=conditions, **common)


def table(measured: Sequence[Measured]) -> str:
    """The bars with this machine's figures, aligned."""
    header = ["what", "bound", "limit", "here", f"p{LOW} to p{HIGH}", "ms", "verdict"]
    lines = []
    for m in measured:
        bar, found = m.bar, m.ratio
        lines.append(
            [
                bar.what,
                f"{'>=' if bar.at_least else '<='} {bar.bound:.2f}x",
                f"{bar.limit:.2f}x" if bar.limit else "",
                f"{found.value:.2f}x" if found else "",
                f"{found.low:.2f} to {found.high:.2f}" if m.seconds else "",
                f"{1e3 * m.seconds:.2f}" if m.seconds else "",
                m.verdict,
            ]
        )
    return "\n".join(aligned(header, lines))


def conditions(sizes: Sizes, threads: int, rounds: int) -> str:
    """How the figures were taken, for the notes."""
    how = "" if compiler_usable() else "; no compiler, all of it eager"
    return (
        f"{sizes.matrix} x {sizes.matrix} values, linear of {sizes.tokens} x {sizes.features} x "
        f"{sizes.features}, step of {sizes.batch} x {sizes.context} tokens; {threads} threads; best of "
        f"{rounds} interleaved rounds; freed memory kept by mallopt{how}"
    )
