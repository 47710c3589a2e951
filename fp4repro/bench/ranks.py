"""What a second rank is worth: the tiny hybrid at the laptop's settings on one rank and on two gloo ranks.

Both train the same batch in two micro-batches, on one thread a rank. Two processes hold everything from the
start; in each round every workload runs one training step in turn, the single rank's while the other process
sleeps in a barrier. Beside them: what the machine itself allows, both processes at one micro-batch and an
optimizer step each with nothing summed between them; and the amax of every weight's shard with one max
all-reduce over all of them, which quantising shards before they are gathered would cost (`train.shards`
quantises after, without it).
"""

import dataclasses
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

import fp4repro
from fp4repro.bench.core import Bar, Measured, rows
from fp4repro.bench.timing import WARM_UP, Timing, ratio
from fp4repro.config import MODELS, Training, load_scale
from fp4repro.layers import QuantLinear
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.optim import adamw
from fp4repro.report.schema import Row
from fp4repro.train.loop import Run
from fp4repro.train.memory import keep_freed_memory
from fp4repro.train.world import ALONE, World

EXPERIMENT = "bench_ranks"
SCALE = MODELS.parent / "scales" / "laptop.yaml"
RANKS, MICROBATCHES, SEED = 2, 2, 0
RECIPES, PARALLEL = ("bf16", "nvfp4"), ("ddp", "fsdp")
CEILING = "speedup_without_sums"
AMAX, OF_STEP, RATE = "amax-all-reduce", "share_of_step", "tokens_per_second"


def alone(recipe: str) -> str:
    return f"{recipe}-one-rank"


def together(recipe: str, parallel: str) -> str:
    return f"{recipe}-two-ranks-{parallel}"


def apart(recipe: str) -> str:
    return f"{recipe}-two-ranks-without-sums"


BARS = tuple(
    Bar(alone(r), f"{r}: two ranks ({p}) against one", together(r, p), f"speedup_{p}", 1.6, at_least=True)
    for r in RECIPES
    for p in PARALLEL
)


@dataclass(frozen=True)
class Sizes:
    """Of a step: sequences and tokens of one; the laptop's."""

    batch: int = 8
    context: int = 128
    microbatches: int = MICROBATCHES


@dataclass(frozen=True)
class Workload:
    """One step; `shared` where all ranks take part."""

    run: Callable[[], None]
    shared: bool


def settings(sizes: Sizes, parallel: str) -> Training:
    """The laptop's, with as many micro-batches as ranks and no end, at the peak learning rate."""
    training = load_scale(SCALE).training
    changes = {"batch": sizes.batch, "context": sizes.context, "accumulate": sizes.microbatches}
    endless = {"tokens": 10**9, "validation_every": 10**9, "warmup_fraction": 0.0}
    return dataclasses.replace(training, parallel=parallel, **changes, **endless)


def training_step(recipe: str, sizes: Sizes, world: World, shared: bool = False) -> Workload:
    """Steps of one run, a fresh batch each; `shared`, all ranks at once, even where each is by itself."""
    config = ModelConfig.from_yaml(MODELS / "tiny.yaml")
    training, cpu = settings(sizes, world.parallel), torch.device("cpu")
    model = HybridModel(config, generator=torch.Generator().manual_seed(SEED))
    fp4repro.convert(model, fp4repro.recipe(recipe), seed=SEED)
    world.place(model, cpu, training)
    optimizer = adamw(model, training.learning_rate, training.betas, training.eps, training.weight_decay)
    run, draw = Run(model, optimizer, training, cpu, world=world), np.random.default_rng(SEED)

    def step() -> None:
        tokens = draw.integers(config.vocabulary, size=(2, sizes.batch, sizes.context))
        run.advance(*tokens, None)

    return Workload(step, shared or world.size > 1)


def amax_all_reduce(sizes: Sizes) -> Workload:
    """Of every quantised weight's shard on this rank."""
    model = HybridModel(
        ModelConfig.from_yaml(MODELS / "tiny.yaml"), generator=torch.Generator().manual_seed(SEED)
    )
    fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    layers = [m.weight.detach() for m in model.modules() if isinstance(m, QuantLinear)]
    mine = [w.chunk(RANKS)[dist.get_rank()] for w in layers]

    def run() -> None:
        amax = torch.stack(torch._foreach_norm(mine, float("inf")))
        dist.all_reduce(amax, dist.ReduceOp.MAX)

    return Workload(run, True)


def _worker(rank: int, port: int, sizes: Sizes, rounds: int, found: Path) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=RANKS)
    workloads = {alone(recipe): training_step(recipe, sizes, ALONE) for recipe in RECIPES}
    for recipe in RECIPES:
        for parallel in PARALLEL:
            world = World(rank, RANKS, parallel)
            workloads[together(recipe, parallel)] = training_step(recipe, sizes, world)
        half = dataclasses.replace(sizes, batch=sizes.batch // RANKS, microbatches=1)
        workloads[apart(recipe)] = training_step(recipe, half, ALONE, shared=True)
    workloads[AMAX] = amax_all_reduce(sizes)
    timings = _interleaved(workloads, rounds, leads=rank == 0)
    if rank == 0:
        torch.save(timings, found)
    dist.barrier()
    dist.destroy_process_group()


def _interleaved(workloads: dict[str, Workload], rounds: int, leads: bool) -> dict[str, tuple[float, ...]]:
    from time import perf_counter

    seconds: dict[str, list[float]] = {name: [] for name in workloads}
    for _ in range(WARM_UP + rounds):
        for name, workload in workloads.items():
            dist.barrier()
            start = perf_counter()
            if workload.shared or leads:
                workload.run()
            if workload.shared:
                dist.barrier()  # a step is over when it is on both ranks
            seconds[name].append(perf_counter() - start)
    return {name: tuple(times[WARM_UP:]) for name, times in seconds.items()}


def timings(sizes: Sizes, rounds: int, folder: Path) -> dict[str, Timing]:
    """Of every workload, by the clock of rank 0; `folder` is for what the processes hand over."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    found = folder / "timings.pt"
    torch.multiprocessing.spawn(_worker, (port, sizes, rounds, found), nprocs=RANKS)
    return {name: Timing(times) for name, times in torch.load(found).items()}


def measured(times: dict[str, Timing]) -> list[Measured]:
    """Every bar, in the table's order."""
    return [
        Measured(bar, ratio(times[bar.setting], times[bar.against]), times[bar.setting].best) for bar in BARS
    ]


def all_rows(times: dict[str, Timing], sizes: Sizes, words: str, where: dict[str, str]) -> Iterator[Row]:
    """The bars' rows without their times, tokens a second of each workload, and the all-reduce."""
    yield from (r for r in rows(measured(times), words, where, EXPERIMENT) if r.metric.startswith("speedup"))
    common = {"experiment": EXPERIMENT, "n": 1, "note": words, **where}
    for name, timing in times.items():
        if name != AMAX:
            rate = sizes.batch * sizes.context / timing.best
            yield Row(setting=name, metric=RATE, value=rate, unit="tokens/s", **common)
    for recipe in RECIPES:
        most = ratio(times[alone(recipe)], times[apart(recipe)])
        ends = {"ci_low": most.low, "ci_high": most.high}
        yield Row(setting=alone(recipe), metric=CEILING, value=most.value, unit="1", **ends, **common)
    share = ratio(times[AMAX], times[together("nvfp4", "fsdp")])
    interval = {"ci_low": share.low, "ci_high": share.high}
    yield Row(setting=AMAX, metric="best_time", value=1e3 * times[AMAX].best, unit="ms", **common)
    yield Row(setting=AMAX, metric=OF_STEP, value=share.value, unit="1", **interval, **common)


def conditions(sizes: Sizes, threads: int, rounds: int) -> str:
    """How the figures were taken, for the notes."""
    return (
        f"tiny hybrid, {sizes.batch} x {sizes.context} tokens a step in {MICROBATCHES} micro-batches, two "
        f"gloo ranks against one, {threads} thread a rank; best of {rounds} interleaved rounds"
    )
