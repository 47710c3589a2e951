"""Bytes of a quantised operand, by formula and as they lie in packed tensors.

A matrix (R, C) of one orientation has R C bits / 8 of codes and one scale a block and row, and hardware
pads the scales of block formats to tiles of 128 x 4. A tensor that two products take is stored in both
orientations unless its units take either (tensor-wise FP8 on Blackwell): the second one doubles what
the format had halved.
"""

import math

import torch

from fp4repro import quantize
from fp4repro.core.formats import FP32, WHOLE, BlockFormat
from fp4repro.core.layout import padded_scales_shape, swizzle_scales
from fp4repro.errors import Fp4ReproError

AMAX_BYTES = 4
BF16_BYTES = 2


def scales_shape(fmt: BlockFormat, rows: int, columns: int) -> tuple[int, int]:
    """Of stored block scales; a tile's scale stands on each of its rows."""
    if fmt.block == (WHOLE, WHOLE):
        return 1, 1
    down, along = fmt.block
    if along == 1:
        return math.ceil(rows / (down or rows)), columns
    return rows, math.ceil(columns / (along or columns))


def operand_bytes(fmt: BlockFormat | None, rows: int, columns: int, padded: bool = False) -> int:
    """Bytes of one orientation of a matrix, with its amax; BF16 for None. `padded`: as hardware wants
    the scales of one byte."""
    if fmt is None:
        return BF16_BYTES * rows * columns
    shape = scales_shape(fmt, rows, columns)
    scale_bytes = math.ceil(fmt.scale.bits / 8) if fmt.scale is not FP32 else 4
    if padded and scale_bytes == 1:
        shape = padded_scales_shape(*shape)
    codes = rows * columns * fmt.element.bits // 8
    return codes + scale_bytes * shape[0] * shape[1] + AMAX_BYTES


def measured_bytes(fmt: BlockFormat, rows: int, columns: int, padded: bool = False) -> int:
    """The same of a packed tensor that is really made."""
    if rows < 1 or columns < 1:
        raise Fp4ReproError(f"a matrix of {rows} x {columns} cannot be stored: both sides must be 1 or more")
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    q = quantize(x, fmt)
    if not padded or q.scales.element_size() > 1:
        return q.nbytes
    return q.nbytes - q.scales.nbytes + swizzle_scales(q.scales).nbytes
