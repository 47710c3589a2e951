"""The core's workloads under pytest-benchmark, each with its ratio and bound in `extra_info`.

    pytest tests/bench_core.py --benchmark-only [--bench-size 1024] [--benchmark-json FILE]

Not collected with the tests. The table with verdicts is `python -m fp4repro.bench core`; here the
statistics, histories and comparisons of pytest-benchmark apply to the same functions.
"""

import dataclasses

import pytest
import torch

from fp4repro.bench import core, workloads
from fp4repro.bench.rivals import RIVALS, rival
from fp4repro.bench.timing import interleaved, ratio
from fp4repro.bench.workloads import Sizes
from fp4repro.train.memory import keep_freed_memory

ROUNDS = 5  # for the ratios; pytest-benchmark takes its own for the times
TIMED = [bar for bar in core.BARS if bar.against]


@pytest.fixture(scope="module")
def functions(request):
    """Every workload by name, and how they are run; a rival that cannot run is left out."""
    keep_freed_memory()
    size = request.config.getoption("--bench-size")
    sizes = dataclasses.replace(Sizes(), matrix=size)
    if size < Sizes.matrix:  # the others shrink with it
        share = size / Sizes.matrix
        sizes = Sizes(size, *(max(128, int(side * share)) for side in (Sizes.tokens, Sizes.features)))
    x = torch.randn(size, size, generator=workloads.generator())
    found = workloads.quantisers(x) | workloads.linears(sizes) | workloads.training_steps(sizes)
    why_not = {}
    for name in RIVALS:
        run, why_not[name] = rival(name, x)
        if run is not None:
            found[name] = run
    return found, why_not, core.conditions(sizes, torch.get_num_threads(), ROUNDS)


@pytest.mark.parametrize("bar", TIMED, ids=lambda bar: bar.setting)
def test_workload(benchmark, functions, bar):
    found, why_not, conditions = functions
    if bar.setting not in found:
        pytest.skip(f"not run: {why_not[bar.setting]}")
    pair = {bar.against: found[bar.against], bar.setting: found[bar.setting]}
    timings = interleaved(pair, ROUNDS)
    got = ratio(timings[bar.setting], timings[bar.against])
    benchmark.group = f"against {bar.against}"
    benchmark.extra_info |= {bar.metric: got.value, "low": got.low, "high": got.high}
    benchmark.extra_info |= {"bound": bar.bound, "met": bar.met(got.value), "conditions": conditions}
    benchmark(found[bar.setting])
