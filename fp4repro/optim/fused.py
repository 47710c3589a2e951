"""The AdamW step of 4-bit states as one C++ kernel, where a processor and a compiler are at hand.

Of `FIRST_MOMENT` and `SECOND_MOMENT`, with any floor; other codecs, other devices and machines without a
compiler take `buckets.make_step` in torch, whose bits are the same. Inductor's cache keeps the library.
"""

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from fp4repro.core.compiled import compiling
from fp4repro.recipes.optimizer import FIRST_MOMENT, SECOND_MOMENT, StateCodec

SOURCES = ("lanes.h", "adamw_step.cpp")
# Inductor's flags contract nothing, but leave square roots to the library and loops as they are.
FLAGS = ("-fno-math-errno", "-ftree-loop-vectorize", "-Wno-psabi")


class _Moment(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "scales", "amax")]


class _Bucket(ctypes.Structure):
    _fields_ = [
        ("first", _Moment),
        ("second", _Moment),
        ("centre", ctypes.c_void_p),
        ("floor", ctypes.c_float),
        ("hyper", ctypes.c_float * 7),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    from torch._inductor.codecache import CppCodeCache

    source = "\n".join(files("fp4repro.optim").joinpath(name).read_text() for name in SOURCES)
    try:
        return CppCodeCache.load(source, device_type="cpu", extra_flags=FLAGS)
    except Exception as error:  # whatever a compiler unlike GCC says
        reason = str(error).strip().splitlines()[0]
        warnings.warn(
            f"fp4repro: the kernel of the 4-bit AdamW could not be built ({reason}); it steps in torch, "
            "several times slower with the same results.",
            stacklevel=4,
        )
        return None


def fusable(codecs: tuple[StateCodec | None, StateCodec | None], device: torch.device) -> bool:
    """Whether the kernel serves states stored so, on that device."""
    first, second = codecs
    if device.type != "cpu" or first != FIRST_MOMENT or second is None or not compiling():
        return False
    return second == SECOND_MOMENT.replace(floor=second.floor) and _library() is not None


def fused_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    blocks: Sequence[int],
    floor: float,
    hyper: Sequence[float],
    stored: Sequence[Tensor],
) -> None:
    """What `buckets.make_step` does, in place: contiguous float32 tensors of `blocks` blocks each, and their
    states, flat, as `codecs.fields_of` names them."""
    codes1, scales1, amax1, codes2, scales2, amax2, centre = (t.data_ptr() for t in stored)
    bucket = _Bucket(
        _Moment(codes1, scales1, amax1),
        _Moment(codes2, scales2, amax2),
        centre,
        floor,
        (ctypes.c_float * 7)(*hyper),
    )
    count = len(params)
    pointers = ctypes.c_void_p * count
    _library().adamw_step(
        ctypes.c_long(count),
        (ctypes.c_long * count)(*blocks),
        pointers(*(t.data_ptr() for t in params)),
        pointers(*(t.data_ptr() for t in grads)),
        ctypes.byref(bucket),
        torch.get_num_threads(),
    )
