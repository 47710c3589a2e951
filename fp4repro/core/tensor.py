"""A quantised matrix as it is stored: packed element codes, block scales, and the tensor's amax.

`codes` and `scales` keep Transformer Engine's linear layout: two 4-bit codes a byte, the even column
in the low nibble; one scale a block, a tile's scale repeated on each of its rows, so that a product
sees 1 x 16 blocks in any case. A tensor whose blocks run down the columns (block (16, 1)) keeps the
layout of the matrix it came from: it is the operand of a product over rows, and
`layout.transpose` turns it into the transposed row-wise tensor that hardware wants.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp4repro.core import kernels
from fp4repro.core.blocks import Blocks
from fp4repro.core.compiled import compiled
from fp4repro.core.formats import E2M1, E4M3, E5M2, FP32, UE8M0, BlockFormat
from fp4repro.core.pairs import halves, make_decode_pairs
from fp4repro.errors import Fp4ReproError

_SCALE_DTYPES = {
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    UE8M0: torch.float8_e8m0fnu,
    FP32: torch.float32,
}
_KERNEL_FORMATS: dict[BlockFormat, BlockFormat] = {}


@dataclass(frozen=True)
class QuantizedTensor:
    """What `quantize` returns.

    codes   uint8 (..., K * bits / 8)
    scales  block decode scales in their stored type (..., K / block columns)
    amax    float32 scalar, the magnitude that the tensor scale was made from
    format  the BlockFormat
    shape   of the tensor that was quantised
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor
    format: BlockFormat
    shape: torch.Size
    _tensor_scale: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def tensor_scale(self) -> Tensor:
        """FP32 scalar that element times block scale is multiplied by; 1 for one-level formats."""
        if self._tensor_scale is None:
            self.with_tensor_scale(kernels.tensor_scales(self.amax, self.format)[1])
        return self._tensor_scale

    def with_tensor_scale(self, scale: Tensor) -> "QuantizedTensor":
        """The tensor itself, spared making its scale from amax a second time."""
        object.__setattr__(self, "_tensor_scale", scale)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and amax as stored."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.amax))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def operand(self) -> Tensor:
        """Element times block scale, exact in BF16: what a product multiplies; `shape`."""
        if not self.format.exact_in_bf16:
            raise Fp4ReproError(
                f"{self.format.name}: code times scale does not fit BF16; use dequantize(torch.float32)"
            )
        blocks = Blocks.of(self.shape, self.format)
        whole = blocks.padded == (blocks.high, blocks.wide)
        if self.format.element is E2M1 and blocks.rows > 1 and not blocks.whole and whole:
            return self._operand_in_pairs(blocks)
        return self._decode(blocks, torch.bfloat16, tensor_level=False)

    def _operand_in_pairs(self, blocks: Blocks) -> Tensor:
        """Of columns, and of tiles as columns whose neighbours share their scale."""
        packed = self.codes.reshape(-1, blocks.rows, blocks.wide // 2)  # (R/r, r, C/2)
        if blocks.compare:
            even, odd = halves(load_scales(self.scales, self.format)[:, None])  # (R/r, 1, C/2)
        else:
            s = load_scales(self.scales.view(blocks.high, -1)[:: blocks.rows], self.format)
            even = odd = s.repeat_interleave(blocks.columns // 2, 1)[:, None]
        pairs = compiled(make_decode_pairs)(packed, even, odd)
        return pairs.view(torch.bfloat16).view(self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(code * block scale) * tensor scale in FP32, one rounding to `dtype`; `shape`."""
        return self._decode(Blocks.of(self.shape, self.format), dtype, tensor_level=True)

    def _decode(self, blocks: Blocks, dtype: torch.dtype, tensor_level: bool) -> Tensor:
        codes = blocks.matrix(unpack(self.codes, self.format))
        s = blocks.spread_stored(load_scales(self.scales, self.format))
        fmt = kernel_format(self.format)
        decode = compiled(kernels.make_decode, fmt, dtype, tensor_level, blocks.compare)
        return blocks.restore(decode(blocks.view(codes), s, self.tensor_scale))


def kernel_format(fmt: BlockFormat) -> BlockFormat:
    """The format as scales, apply and decode see it: their views hide the block, so that blocks of all
    shapes share one compiled kernel."""
    if fmt not in _KERNEL_FORMATS:  # a dict, since a graph that takes this in warns of `functools.cache`
        _KERNEL_FORMATS[fmt] = fmt.replace(name="", block=(1, 1), pads=False)
    return _KERNEL_FORMATS[fmt]


def store_scales(s: Tensor, fmt: BlockFormat) -> Tensor:
    """FP32 values of scales, exact in their type, as stored; uint8 codes where torch lacks the type."""
    dtype = _SCALE_DTYPES.get(fmt.scale)
    return kernels.encode_elements(s, None, fmt.scale) if dtype is None else s.to(dtype)


def load_scales(scales: Tensor, fmt: BlockFormat) -> Tensor:
    """The inverse of `store_scales`."""
    if fmt.scale in _SCALE_DTYPES:
        return scales.to(torch.float32)
    return kernels.decode_elements(scales, fmt.scale)


def pack(codes: Tensor, fmt: BlockFormat) -> Tensor:
    """Codes (uint8, one an element, contiguous) as stored: two to a byte for 4-bit elements."""
    if fmt.element.bits == 8:
        return codes
    words = codes.view(torch.int16).view(-1)
    return compiled(kernels.make_pack)(words).view(*codes.shape[:-1], -1)


def unpack(packed: Tensor, fmt: BlockFormat) -> Tensor:
    """The inverse of `pack`."""
    if fmt.element.bits == 8:
        return packed
    words = compiled(kernels.make_unpack)(packed.reshape(-1))
    return words.view(torch.uint8).view(*packed.shape[:-1], -1)
