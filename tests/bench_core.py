"""The core's workloads under pytest-benchmark, each with its ratio and bound in `extra_info`.

    make bench
    pytest tests/bench_core.py --benchmark-only [--bench-size 1024] [--benchmark-json FILE] [--bench-record]

Not collected with the tests. A ratio fails that is worse than the one in `bench_core.json` by more than
the tolerance beside it, which comes from the spread of the repetitions when it was recorded; times are
the machine's own and are not compared. `--bench-record` writes the file anew. The table with verdicts is
`python -m fp4repro.bench core`.
"""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import torch

from fp4repro.bench import core, workloads
from fp4repro.bench.rivals import RIVALS, rival
from fp4repro.bench.timing import interleaved, ratio
from fp4repro.bench.workloads import Sizes
from fp4repro.files import atomic_write
from fp4repro.train.memory import keep_freed_memory

RECORD = Path(__file__).with_suffix(".json")
REPEATS, ROUNDS = 3, 5  # ratios taken, and rounds for each; pytest-benchmark takes its own for the times
THREADS = 2
LEAST_TOLERANCE = 0.10  # neighbours on a shared machine move ratios by several per cent
SPREADS = 3  # the tolerance in spreads of the repetitions
TIMED = [bar for bar in core.BARS if bar.against]


@pytest.fixture(scope="module")
def functions(request):
    """Every workload by name, and how they are run; a rival that cannot run is left out."""
    keep_freed_memory()
    torch.set_num_threads(THREADS)
    size = request.config.getoption("--bench-size")
    sizes = dataclasses.replace(Sizes(), matrix=size)
    if size < Sizes.matrix:  # the others shrink with it
        share = size / Sizes.matrix
        sizes = Sizes(size, *(max(128, int(side * share)) for side in (Sizes.tokens, Sizes.features)))
    x = torch.randn(size, size, generator=workloads.generator())
    torch.empty(core.TOUCHED * x.nbytes, dtype=torch.uint8).fill_(0)
    found = workloads.quantisers(x) | workloads.linears(sizes) | workloads.training_steps(sizes)
    why_not = {}
    for name in RIVALS:
        run, why_not[name] = rival(name, x)
        if run is not None:
            found[name] = run
    gpu = workloads.on_gpu(x)
    why_not |= {} if gpu else dict.fromkeys((workloads.GPU_AMAX, workloads.GPU_APPLY), "no CUDA device")
    found |= gpu
    return found, why_not, core.conditions(sizes, THREADS, ROUNDS)


def worse_by(bar, got: float, recorded: float) -> float:
    """Relative change for the worse; negative for the better."""
    return (recorded / got if bar.at_least else got / recorded) - 1


def tolerance(ratios: list[float]) -> float:
    return max(LEAST_TOLERANCE, SPREADS * (max(ratios) - min(ratios)) / statistics.median(ratios))


def record(bar, ratios: list[float]) -> None:
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known[bar.setting] = {
        "ratio": round(statistics.median(ratios), 3),
        "tolerance": round(tolerance(ratios), 3),
    }
    with atomic_write(RECORD) as path:
        path.write_text(json.dumps(known, indent=2) + "\n")


@pytest.mark.parametrize("bar", TIMED, ids=lambda bar: bar.setting)
def test_workload(benchmark, functions, bar, request):
    found, why_not, conditions = functions
    if bar.setting not in found:
        pytest.skip(f"not run: {why_not[bar.setting]}")
    pair = {bar.against: found[bar.against], bar.setting: found[bar.setting]}
    ratios = []
    for _ in range(REPEATS):
        timings = interleaved(pair, ROUNDS)
        ratios.append(ratio(timings[bar.setting], timings[bar.against]).value)
    got = statistics.median(ratios)
    benchmark.group = f"against {bar.against}"
    benchmark.extra_info |= {bar.metric: got, "low": min(ratios), "high": max(ratios)}
    benchmark.extra_info |= {"bound": bar.bound, "met": bar.met(got), "conditions": conditions}
    benchmark.pedantic(found[bar.setting], rounds=ROUNDS)
    if request.config.getoption("--bench-record"):
        record(bar, ratios)
        return
    if request.config.getoption("--bench-size") != Sizes.matrix:
        return  # the record is of the full size
    known = json.loads(RECORD.read_text()).get(bar.setting) if RECORD.exists() else None
    if known is None:
        pytest.skip(f"{RECORD.name} has no ratio to compare with: write it with --bench-record")
    worse = worse_by(bar, got, known["ratio"])
    assert worse <= known["tolerance"], (
        f"{bar.setting}: {got:.2f}x, recorded {known['ratio']:.2f}x: worse by {worse:.0%}, "
        f"tolerance {known['tolerance']:.0%}"
    )
