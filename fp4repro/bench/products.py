"""The formats that the GEMM benchmark compares, and how each is multiplied: emulated, or by the GPU.

A format says how both operands are quantised by the one quantiser; `emulated` multiplies what that
gives in BF16 with FP32 sums, `native` hands the same codes and scales to `scaled_mm`. Its layouts:
tensor-wise and row-wise scales in FP32; 1x128 by 128x128 (Hopper), scales of a column of blocks
beside each other; MX and NVFP4 scales swizzled in tiles of 128 x 4 (Blackwell).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from fp4repro import QuantizedTensor, matmul, quantize
from fp4repro.backends import native_matmul
from fp4repro.core.formats import (
    E4M3,
    FP8_FP32_SCALES,
    FP8_TENSOR,
    FP32,
    MXFP8,
    NVFP4,
    WHOLE,
    BlockFormat,
)
from fp4repro.core.layout import swizzle_scales

FP8_ROW = BlockFormat("fp8_row", E4M3, (1, WHOLE), FP32, pads=True)
OUTPUT = torch.bfloat16  # as in training
Multiply = Callable[[QuantizedTensor, QuantizedTensor], Tensor]


@dataclass(frozen=True)
class Compared:
    """One column of the benchmark; `a` (M, K) and `b` (N, K) are quantised along K."""

    name: str
    operand: str  # class of the units: bf16, fp8, fp4
    a: BlockFormat | None = None
    b: BlockFormat | None = None
    capabilities: tuple[int, int] = (0, 99)  # major compute capabilities that multiply it, from and to
    multiply: Multiply | None = None  # on the GPU

    def prepare(self, a: Tensor, b: Tensor) -> tuple:
        """The quantisation that is timed with or without the product."""
        return (a, b) if self.a is None else (quantize(a, self.a), quantize(b, self.b))

    def emulated(self, operands: tuple) -> Tensor:
        a, b = operands
        return a @ b.T if self.a is None else matmul(a, b, OUTPUT)

    def native(self, operands: tuple) -> Tensor:
        a, b = operands
        return a @ b.T if self.a is None else self.multiply(a, b)

    def dequantised(self, operands: tuple) -> tuple[Tensor, Tensor]:
        """The values that are multiplied, in float64."""
        a, b = operands
        if self.a is None:
            return a.double(), b.double()
        return a.dequantize(torch.float32).double(), b.dequantize(torch.float32).double()

    def runs_on(self, major: int) -> bool:
        return self.capabilities[0] <= major <= self.capabilities[1]


def _fp8(q: QuantizedTensor) -> Tensor:
    return q.codes.view(torch.float8_e4m3fn)


def _scaled(
    a: QuantizedTensor,
    b: QuantizedTensor,
    scales: tuple[Tensor, Tensor],
    kinds: tuple[ScalingType, ScalingType],
    swizzle: SwizzleType = SwizzleType.NO_SWIZZLE,
) -> Tensor:
    return scaled_mm(
        _fp8(a),
        _fp8(b).T,
        scales[0],
        kinds[0],
        scales[1],
        kinds[1],
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=OUTPUT,
    )


def tensor_wise(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    return _scaled(a, b, (a.scales.view(1), b.scales.view(1)), (ScalingType.TensorWise,) * 2)


def row_wise(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    return _scaled(a, b, (a.scales, b.scales.view(1, -1)), (ScalingType.RowWise,) * 2)


def blocks_of_128(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """1x128 scales (M, K / 128) with the rows beside each other; 128x128 scales (K / 128, N / 128), the
    blocks along K beside each other and padded to four."""
    of_a = a.scales.T.contiguous().T
    tiles = b.scales[::128]  # stored once a row
    of_b = pad(tiles, (0, -tiles.shape[1] % 4)).contiguous().T
    return _scaled(a, b, (of_a, of_b), (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128))


def mx(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    scales = swizzle_scales(a.scales), swizzle_scales(b.scales)
    return _scaled(a, b, scales, (ScalingType.BlockWise1x32,) * 2, SwizzleType.SWIZZLE_32_4_4)


BF16 = Compared("bf16", "bf16")
COMPARED = (
    BF16,
    Compared("fp8-tensor", "fp8", FP8_TENSOR, FP8_TENSOR, (9, 10), tensor_wise),
    Compared("fp8-row", "fp8", FP8_ROW, FP8_ROW, (9, 10), row_wise),
    Compared("fp8-128", "fp8", FP8_FP32_SCALES, FP8_FP32_SCALES.with_block(128, 128), (9, 9), blocks_of_128),
    Compared("mxfp8", "fp8", MXFP8, MXFP8, (10, 10), mx),
    Compared("nvfp4", "fp4", NVFP4, NVFP4, (10, 10), native_matmul),
)
