"""Keeping freed memory in the process.

glibc returns each large block to the system when it is freed, and a training step frees and takes the
same blocks again: every page is then cleared and mapped anew, a tenth of a small model's step.
"""

import ctypes
import sys

# Names and numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_LARGEST = 2**31 - 1
_TOP_PAD = 64 * 2**20  # bytes


def keep_freed_memory() -> None:
    """From now on, where the C library is glibc; elsewhere nothing changes."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in (
            (_M_MMAP_MAX, 0),
            (_M_TRIM_THRESHOLD, _LARGEST),
            (_M_TOP_PAD, _TOP_PAD),
        ):
            mallopt(option, value)
