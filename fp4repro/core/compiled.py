"""One definition in torch, compiled where there is a compiler, run as it stands where there is none.

`compiled(make, *options)` turns the function that `make(*options)` returns into one that inductor has
compiled for any shape. Each gets a code object of its own: dynamo counts recompilations by code
object and silently falls back to eager past eight, which closures of one factory would reach at
once. Without a C++ compiler (or with FP4REPRO_COMPILE=0) the same function runs eagerly, with one
warning; the bits are equal in both.
"""

import os
import types
import warnings
from collections.abc import Callable
from functools import cache
from itertools import count

import torch
from torch import Tensor

_state = {"usable": None}


def compiler_usable() -> bool:
    """Whether inductor can build for this machine; probed once, by compiling a trifle."""
    if _state["usable"] is None:
        _state["usable"] = os.environ.get("FP4REPRO_COMPILE", "1") != "0" and _probe()
    return _state["usable"]


def compile_nothing() -> None:
    """Run all that is asked for from now on as it stands, as FP4REPRO_COMPILE=0 does."""
    _state["usable"] = False


def _probe() -> bool:
    try:
        probe = torch.compile(lambda x: torch.where(x > 1, x * 2, x), dynamic=True)
        return bool(probe(torch.ones(64))[0] == 1)
    except Exception as error:  # whatever a missing or broken compiler raises: it differs by version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        warnings.warn(
            f"fp4repro: no usable C++ compiler ({reason}); quantisation runs eagerly, several times "
            "slower with the same results. Install g++ to speed it up.",
            stacklevel=3,
        )
        return False


class _Compiled:
    """One function of plain tensors, compiled once for each combination of types and for all shapes.

    What varies is marked as dynamic at the first call: `torch.compile(dynamic=True)` would also turn
    the formats' integers into variables, and with them every constant of the kernel. Sides of one stay
    constant, and those that a kernel's own view names. Gradients and autocast are off within, so that
    a caller's modes make no kernels of their own.
    """

    def __init__(self, function: Callable) -> None:
        self._function = function
        self._runs: dict[tuple, Callable] = {}

    def __call__(self, *args: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():  # a caller's graph takes the function in as it is
            return self._function(*args)
        device = args[0].device.type
        kind = (device, torch.is_inference_mode_enabled(), *(a if a is None else a.dtype for a in args))
        run = self._runs.get(kind)
        if run is None:
            run = self._runs[kind] = torch.compile(self._own_code())
            for tensor in args:
                _mark_dynamic(tensor)
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device):
            with torch.no_grad(), torch.autocast(device, enabled=False):
                return run(*args)
        return run(*args)

    def _own_code(self) -> Callable:
        f = self._function
        code = f.__code__.replace(co_name=f"{f.__name__}_{next(_serial)}")
        return types.FunctionType(code, f.__globals__, code.co_name, f.__defaults__, f.__closure__)


def _mark_dynamic(tensor: Tensor | None) -> None:
    for axis, side in enumerate(() if tensor is None else tensor.shape):
        if side > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, axis)


_serial = count()


@cache
def compiled(make: Callable[..., Callable], *options: object) -> Callable:
    """The function `make(*options)`, compiled for dynamic shapes where a compiler is usable."""
    function = make(*options)
    return _Compiled(function) if compiler_usable() else function
