"""Timing on a CUDA device, and what must be known of the device for a time to mean something.

One call is timed between two events. Before it the L2 cache is filled with other bytes, so that
operands come from memory, and the device is kept busy for longer than a launch takes, so that the
host's part is hidden. `Events` is the one place that touches CUDA, and can be replaced in tests.
"""

import subprocess
from collections.abc import Callable
from importlib import metadata

import torch

from fp4repro.backends import transformer_engine

L2_BYTES = 256 * 2**20  # more than any L2 cache
BUSY_CYCLES = 200_000  # about 0.1 ms
_QUERY = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "power.draw")


class Events:
    """What timing needs of a device."""

    def __init__(self) -> None:
        self._other = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")

    def flush(self) -> None:
        self._other.zero_()

    def keep_busy(self) -> None:
        torch.cuda._sleep(BUSY_CYCLES)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def device_seconds(events: Events) -> Callable[[Callable[[], object]], float]:
    """A `seconds_of` for `timing.interleaved`."""

    def measure(function: Callable[[], object]) -> float:
        events.flush()
        events.keep_busy()
        start = events.record()
        function()
        end = events.record()
        return events.seconds(start, end)

    return measure


def conditions() -> dict[str, str]:
    """Clocks, power limit and versions, as the driver and the packages tell them."""
    found = {"cuda": str(torch.version.cuda), "torch": str(torch.__version__)}
    for package in ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13"):
        try:
            found["cublas"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["transformer-engine"] = transformer_engine.version() or "not installed"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    first = (answer.splitlines() or [""])[0].split(", ")
    found |= dict(zip(_QUERY, first, strict=False)) if len(first) == len(_QUERY) else {"clocks": "unknown"}
    return found


def kernel_names(function: Callable[[], object]) -> list[str]:
    """Names of the kernels that one call launches."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "CUDA" in str(event.device_type)]
