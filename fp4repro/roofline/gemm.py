"""The time of one matrix product: the larger of arithmetic and memory traffic.

The output (M, N) is cut into tiles, and the tiles go to the multiprocessors in waves: what the last
wave and tiles at the edge leave idle is lost (tile and wave quantisation). The tile is the one of
`TILES` that loses least. Operands are read once and the output is written once: tiles that share
operands find them in the L2 cache.
"""

import math
from dataclasses import dataclass

from fp4repro.core.formats import BlockFormat
from fp4repro.roofline.devices import Device
from fp4repro.roofline.factors import Factors

TILES = ((128, 256), (256, 128), (128, 128))  # rows and columns of the output
BF16_BITS = 16.0


def operand_class(fmt: BlockFormat | None) -> str:
    """Which units multiply a format: "bf16" for None."""
    return "bf16" if fmt is None else f"fp{fmt.element.bits}"


def operand_bits(fmt: BlockFormat | None) -> float:
    """Stored bits a value, block scales included."""
    return BF16_BITS if fmt is None else fmt.bits_per_value


@dataclass(frozen=True)
class Gemm:
    """(M, K) times (K, N), named by its linear and product; both operands of one format."""

    linear: str
    product: str  # fprop, dgrad or wgrad
    m: int
    n: int
    k: int
    format: BlockFormat | None = None
    output_bytes: int = 2

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """Read and written in device memory."""
        operands = operand_bits(self.format) / 8 * (self.m * self.k + self.k * self.n)
        return operands + self.output_bytes * self.m * self.n

    @property
    def operand(self) -> str:
        return operand_class(self.format)

    def seconds(self, device: Device, factors: Factors) -> float:
        arithmetic = self.flops / factors.rate(device, self.operand)
        arithmetic /= occupancy(self.m, self.n, device.sms)
        traffic = self.bytes / (factors.stream * device.bytes_per_second)
        return max(arithmetic, traffic) + factors.launch


def occupancy(m: int, n: int, sms: int) -> float:
    """Share of the multiprocessors' time that makes output, with the best tile; in (0, 1]."""
    return max(_occupancy(m, n, rows, columns, sms) for rows, columns in TILES)


def _occupancy(m: int, n: int, rows: int, columns: int, sms: int) -> float:
    tiles = math.ceil(m / rows) * math.ceil(n / columns)
    waves = math.ceil(tiles / sms)
    return m * n / (waves * sms * rows * columns)
