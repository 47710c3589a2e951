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
    """Marks the sides that vary as dynamic at its first call, so that one compilation serves all.

    `torch.compile(dynamic=True)` would also turn the formats' integers into variables, and with them
    every constant of the kernel. Sides of one, and the middle side of a three-dimensional view (the
    block), stay constant.
    """

    def __init__(self, function: Callable, serial: int) -> None:
        code = function.__code__.replace(co_name=f"{function.__name__}_{serial}")
        own = types.FunctionType(
            code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
        )
        self._run = torch.compile(own)
        self._marked = False

    def __call__(self, *args: Tensor | None) -> Tensor:
        if not self._marked:
            for tensor in args:
                self._mark(tensor)
            self._marked = True
        return self._run(*args)

    @staticmethod
    def _mark(tensor: Tensor | None) -> None:
        if tensor is None or tensor.dim() == 0:
            return
        for axis in (0,) if tensor.dim() < 3 else (0, 2):
            if tensor.shape[axis] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, axis)


_serial = count()


@cache
def compiled(make: Callable[..., Callable], *options: object) -> Callable:
    """The function `make(*options)`, compiled for dynamic shapes where a compiler is usable."""
    function = make(*options)
    return _Compiled(function, next(_serial)) if compiler_usable() else function
