"""The layouts that hardware wants: transposed operands, and scales swizzled for the tensor core.

NVFP4 products take both operands row-wise along the contraction, so what wgrad and dgrad multiply is a
real transpose: the nibbles of two rows are paired anew, transposing bytes would be wrong. Block scales
go to the product in tiles of 128 rows by 4 columns, 512 bytes each; with C columns, scale (r, c) lies at
(r // 128 * ceil(C / 4) + c // 4) * 512 + (r % 32) * 16 + (r // 32 % 4) * 4 + c % 4. Padding is zero.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4repro.core.tensor import QuantizedTensor, pack, unpack
from fp4repro.errors import Fp4ReproError

TILE_ROWS, TILE_COLUMNS = 128, 4


def transpose(q: QuantizedTensor) -> QuantizedTensor:
    """The matrix (R, C) as its transpose (C, R), same values, blocks turned with it.

    Blocks of (16, 1) become (1, 16), what a TN product takes; 16x16 tiles stay tiles.
    """
    if len(q.shape) != 2:
        raise Fp4ReproError(f"only matrices can be transposed, got shape {tuple(q.shape)}")
    rows, columns = q.format.block
    codes = unpack(q.codes, q.format).T.contiguous()
    if codes.shape[1] * q.format.element.bits % 8:
        raise Fp4ReproError(f"a transpose of {tuple(q.shape)} would end in half a byte: pad its rows to even")
    fmt = q.format.transposed
    scales = q.scales.view(torch.uint8) if q.scales.element_size() == 1 else q.scales
    if rows > 1 and columns > 1:  # a tile's scale: one a row before, one a row after
        scales = scales[::rows].T.repeat_interleave(columns, 0)
        scales = scales[: q.shape[1]]
    else:
        scales = scales.T
    scales = scales.contiguous().view(q.scales.dtype)
    shape = torch.Size((q.shape[1], q.shape[0]))
    return QuantizedTensor(pack(codes, fmt), scales, q.amax, fmt, shape)


def padded_scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """What scales (rows, columns) are padded to."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def swizzle_scales(scales: Tensor) -> Tensor:
    """Scales (R, C) of one byte each, in the order of the product; flat, zero-padded."""
    if scales.dim() != 2 or scales.element_size() != 1:
        raise Fp4ReproError(
            f"swizzling takes scales (rows, columns) of one byte, got {tuple(scales.shape)} {scales.dtype}"
        )
    rows, columns = scales.shape
    high, wide = padded_scales_shape(rows, columns)
    flat = pad(scales.view(torch.uint8), (0, wide - columns, 0, high - rows))
    tiles = flat.view(high // 128, 4, 32, wide // 4, 4)  # (R/128, r//32, r%32, C/4, c%4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle_scales` for scales (rows, columns)."""
    high, wide = padded_scales_shape(rows, columns)
    if buffer.numel() != high * wide:
        raise Fp4ReproError(
            f"scales ({rows}, {columns}) fill {high * wide} bytes when swizzled, not {buffer.numel()}"
        )
    tiles = buffer.view(torch.uint8).view(high // 128, wide // 4, 32, 4, 4)
    flat = tiles.permute(0, 3, 2, 1, 4).reshape(high, wide)
    return flat[:rows, :columns].contiguous().view(buffer.dtype)
