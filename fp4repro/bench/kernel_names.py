"""Which format a GEMM kernel multiplies, by its name, so that a silent fall-back is not timed as FP4.

Libraries may take BF16 or FP8 units for shapes that their FP4 kernels do not support. CUTLASS kernels
spell the operand type. cuBLAS's `nvjet` kernels have a letter for each of A and B: o, q, t (E2M1,
E4M3 and BF16; the letters are observed, not documented). A name that tells nothing counts as
unknown, never as the wished format.
"""

import re
from collections.abc import Sequence

# The first that matches decides.
_SPELLED = (
    ("fp4", re.compile(r"e2m1|nvf4|mxf4|fp4|ue4m3|f4f4")),
    ("fp8", re.compile(r"e4m3|e5m2|fp8|f8f6f4|mxf8|qmma")),
    ("bf16", re.compile(r"bf16|bfloat16|s16816gemm")),
)
_NVJET = re.compile(r"nvjet_(?:sm\d+a?_)?([a-z])([a-z])")
_LETTERS = {"o": "fp4", "q": "fp8", "t": "bf16"}
_GEMM = re.compile(r"gemm|nvjet|matmul|mma|cutlass", re.IGNORECASE)


def operand_of(name: str) -> str | None:
    """ "fp4", "fp8", "bf16", or None where the name does not say."""
    if letters := _NVJET.search(name):
        return _LETTERS.get(letters[1])
    return next((operand for operand, spelled in _SPELLED if spelled.search(name.lower())), None)


def fault(names: Sequence[str], wished: str) -> str | None:
    """Why the kernels of one product are not those of the wished format; None where they are."""
    gemms = [name for name in names if _GEMM.search(name)]
    if not gemms:
        return "no GEMM kernel was seen"
    for name in gemms:
        found = operand_of(name)
        if found is None:
            return f"the kernel {name} does not say what it multiplies"
        if found != wished:
            return f"fell back to {found.upper()}: kernel {name}"
    return None
