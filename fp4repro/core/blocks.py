"""How a tensor falls into blocks: views for the kernels, shapes of scales, padding, refusals.

Leading axes are flattened, so that a block of several rows may span what were two matrices (a batch
of sequences is one matrix of tokens). Formats that pad (FP8's 128) get zeros up to a whole block,
trimmed afterwards; the others refuse, as the hardware does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4repro.core.formats import WHOLE, BlockFormat
from fp4repro.core.kernels import LANES, pairwise_sum
from fp4repro.errors import Fp4ReproError


@dataclass(frozen=True)
class Blocks:
    """The blocks of one shape in one format: matrix (high, wide), block (rows, columns)."""

    shape: torch.Size
    high: int
    wide: int
    rows: int
    columns: int
    whole: bool  # one block spans every tensor of the format

    @classmethod
    def of(cls, shape: torch.Size, fmt: BlockFormat) -> "Blocks":
        """Refuses, with a sentence, what the format cannot hold."""
        if len(shape) < 2:
            raise Fp4ReproError(
                f"{fmt.name} needs at least two axes, got shape {tuple(shape)}: add one with x[None]"
            )
        wide = shape[-1]
        high = shape.numel() // wide if wide else 0
        if not high:
            raise Fp4ReproError(f"{fmt.name} cannot quantise an empty tensor of shape {tuple(shape)}")
        rows = fmt.block[0] or high
        columns = fmt.block[1] or -(-wide // LANES) * LANES
        if not fmt.pads:
            for what, side, block in (
                ("product of the leading axes", high, rows),
                ("last axis", wide, columns),
            ):
                if side % block:
                    raise Fp4ReproError(
                        f"{fmt.name} blocks of {rows}x{columns} need the {what} to be a multiple of "
                        f"{block}, got {side} in shape {tuple(shape)}: pad it, or keep this tensor in BF16"
                    )
        if wide % (8 // fmt.element.bits):
            raise Fp4ReproError(f"{fmt.name} packs pairs of columns, got {wide} in shape {tuple(shape)}")
        return cls(shape, high, wide, rows, columns, whole=fmt.block == (WHOLE, WHOLE))

    @property
    def padded(self) -> tuple[int, int]:
        """Sides of the matrix in whole blocks."""
        return (
            -(-self.high // self.rows) * self.rows,
            -(-self.wide // self.columns) * self.columns,
        )

    @property
    def compare(self) -> bool:
        """Columns are long rows to the compiler: see `rounding`."""
        return self.columns == 1

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Of the scales as stored: one a block, a tile's repeated on its rows."""
        if self.whole:
            return ()
        if self.columns == 1:
            return -(-self.high // self.rows), self.wide
        return *self.shape[:-1], -(-self.wide // self.columns)

    def matrix(self, x: Tensor) -> Tensor:
        """(high, wide), padded with zeros to whole blocks, contiguous."""
        high, wide = self.padded
        x = x.reshape(self.high, self.wide)
        if (high, wide) != (self.high, self.wide):
            x = pad(x, (0, wide - self.wide, 0, high - self.high))
        return x.contiguous()

    def for_amax(self, matrix: Tensor) -> Tensor:
        if self.whole:
            return _view(matrix, 1, -1)
        if self.columns == 1:
            return _view(matrix, -1, self.rows, matrix.shape[1])  # (R/r, r, C)
        return matrix if self.rows > 1 else _view(matrix, -1, self.columns)  # (R C / c, c)

    def view(self, matrix: Tensor) -> Tensor:
        """For apply and decode."""
        if self.compare:
            return _view(matrix, -1, self.rows, matrix.shape[1])  # (R/r, r, C)
        return _view(matrix, -1, LANES)  # (R C / 16, 16)

    def view_with_scales(self, matrix: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
        """For apply: the matrix and its scales. Tiles of FP32 keep their scales as they are, one for 256
        lanes; in BF16, whose four axes do not vectorise, they are spread like those of longer rows."""
        if self.rows > 1 and self.columns == LANES and matrix.dtype == torch.float32:
            tiles = _view(matrix, -1, self.rows, matrix.shape[1] // LANES, LANES)
            return tiles, *(s.view(tiles.shape[0], 1, tiles.shape[2], 1) for s in scales)
        return self.view(matrix), *(self.spread(s) for s in scales)

    def spread(self, s: Tensor) -> Tensor:
        """Scales from the shape of `for_amax`'s blocks to that of `view`: one for each 16 lanes."""
        if self.compare or (self.rows, self.columns) == (1, LANES):
            return s
        high, _ = self.padded
        per_row = s.view(high // self.rows, 1, -1, 1)  # (R/r, 1, C/c, 1)
        lanes = self.columns // LANES
        return per_row.expand(-1, self.rows, -1, lanes).reshape(-1, 1)

    def store(self, s: Tensor) -> Tensor:
        """Scales from the shape of `for_amax`'s blocks to the stored one."""
        if self.whole:
            return s.reshape(())
        if self.compare:
            return s.reshape(-1, self.padded[1])[:, : self.wide]
        if self.rows == 1 and self.padded == (self.high, self.wide):
            return s.view(self.scales_shape)
        high, _ = self.padded
        repeated = s.view(high // self.rows, 1, -1).expand(-1, self.rows, -1).reshape(high, -1)
        return repeated[: self.high].reshape(self.scales_shape)

    def spread_stored(self, scales: Tensor) -> Tensor:
        """Stored scales (as FP32) to the shape of `view`."""
        high, wide = self.padded
        if self.whole:
            return self.spread(scales.reshape(1, 1))
        if self.compare:
            return pad(scales, (0, wide - self.wide))[:, None]  # (R/r, 1, C)
        per_row = pad(scales.reshape(self.high, -1), (0, 0, 0, high - self.high))
        return per_row[..., None].expand(-1, -1, self.columns // LANES).reshape(-1, 1)

    def restore(self, values: Tensor) -> Tensor:
        """From `view`'s shape back to the tensor's own, padding trimmed."""
        matrix = values.view(self.padded)
        return matrix[: self.high, : self.wide].reshape(self.shape)

    def sum_to_blocks(self, partial: Tensor, shape: torch.Size) -> Tensor:
        """Sums over 16 lanes (or over a column block) up to sums over blocks, of the scales' shape."""
        if self.compare:
            return partial
        high, _ = self.padded
        tiles = partial.view(high // self.rows, self.rows, -1, self.columns // LANES)
        return pairwise_sum(pairwise_sum(tiles, 1), 3).reshape(shape)


def _view(matrix: Tensor, *shape: int) -> Tensor:
    """A view that does not know its base: compiled kernels would be told apart by the base's shape."""
    return torch.ops.aten._unsafe_view(matrix, shape)
