"""Timing on a machine that others use too: interleaved rounds, the minimum, and ratios by round.

Each round calls every function once, so that what disturbs a moment disturbs all of them, and a
ratio is between neighbours in time. The minimum estimates the undisturbed time; the 20th and 80th
percentile of the rounds' own ratios say how far it can be trusted.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

LOW, HIGH = 20, 80  # percentiles that are reported
WARM_UP = 2  # rounds that do not count; the first one compiles


@dataclass(frozen=True)
class Timing:
    """Seconds of one function, one entry a round."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> tuple[float, float, float]:
        """Median and the two percentiles, for a machine that nobody else uses."""
        median, low, high = np.percentile(self.seconds, [50, LOW, HIGH])
        return float(median), float(low), float(high)


@dataclass(frozen=True)
class Ratio:
    """`value` is minimum over minimum; `low` and `high` are percentiles of the rounds' ratios."""

    value: float
    low: float
    high: float


def host_seconds(function: Callable[[], object]) -> float:
    """Of one call, by the host's clock."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds_of: Callable[[Callable[[], object]], float] = host_seconds,
) -> dict[str, Timing]:
    """Time each function `rounds` times, in turn; `seconds_of` times one call."""
    for _ in range(WARM_UP):
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, function in functions.items():
                seconds[name].append(seconds_of(function))
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


def ratio(timing: Timing, against: Timing) -> Ratio:
    """How many times as long the first takes; both must come from the same rounds."""
    pairs = np.array(timing.seconds) / np.array(against.seconds)
    low, high = np.percentile(pairs, [LOW, HIGH])
    return Ratio(timing.best / against.best, float(low), float(high))
