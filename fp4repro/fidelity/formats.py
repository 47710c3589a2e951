"""Number formats on data: error, clipping, flushing, and how many values stay near FP8.

Each format quantises each matrix for storage; the figures come from what is stored, dequantised, so
they hold for every user of the core. The claim of arXiv 2509.25149, appendix B, is counted block by
block: at least one value in 16 (6.25 %) keeps near-FP8 precision, since a block's amax maps to 6 and
has the error of its E4M3 scale alone. `report.formats` says what each metric means.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp4repro.core.blocks import Blocks
from fp4repro.core.formats import E4M3, FP8, FP8_FP32_SCALES, FP8_TENSOR, MXFP4, MXFP8, NVFP4, BlockFormat
from fp4repro.core.layout import swizzle_scales
from fp4repro.core.lost import SLACK, lost
from fp4repro.core.quantize import Rounding, prepare
from fp4repro.core.random import RandomKey
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.report import formats as names
from fp4repro.report.schema import NOT_RUN, Row

# Nearest rounding to m mantissa bits errs by at most u / (1 + u) of a normal value, u = 2**-(m + 1).
_UNIT = 2.0 ** -(E4M3.mantissa_bits + 1)
NEAR = _UNIT / (1 + _UNIT)  # 1/17
CLAIM = 1 / 16  # of a block's values
# Block widths whose one-byte scales the tensor core takes in tiles of 128 x 4.
_TILED_WIDTHS = (16, 32)


@dataclass(frozen=True)
class Case:
    """One row of the study."""

    format: BlockFormat
    rounding: Rounding = "nearest"


CASES = {
    "nvfp4-1x16": Case(NVFP4),
    "nvfp4-1x16-stochastic": Case(NVFP4, "stochastic"),
    "nvfp4-16x16": Case(NVFP4.with_block(16, 16)),
    # arXiv 2512.02010; the block scale of a four is 3/2 times larger, for which 256 leaves room.
    "nvfp4-four-over-six": Case(NVFP4.replace(four_over_six="mse", scale_target=256.0)),
    "nvfp4-one-level": Case(NVFP4.replace(tensor_scale=False)),
    "mxfp4-up": Case(MXFP4),
    # OCP Microscaling 1.0: the block's largest power of two maps to the element's, which is 4.
    "mxfp4-down": Case(MXFP4.replace(scale_rounding="down", target=4.0)),
    "mxfp8": Case(MXFP8),
    "fp8-1x128": Case(FP8),
    "fp8-128x128": Case(FP8.with_block(128, 128)),
    "fp8-1x128-fp32-scales": Case(FP8_FP32_SCALES),
    "fp8-tensor": Case(FP8_TENSOR),
}


@dataclass
class Tally:
    """What one case did to one or several tensors."""

    case: Case
    errors: list[float] = field(default_factory=list)  # relative MSE of each tensor
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, x: Tensor, key: RandomKey) -> None:
        """Quantise x (rows, columns). One that is zero all over has no relative error: only its bits
        are counted."""
        prepared = prepare(x, self.case.format)
        stored = prepared.store(self.case.rounding, key, bits=8)
        blocks, magnitude = prepared.blocks, x.float().abs()
        got = stored.dequantize(torch.float32)
        error = (got - x.float()).abs()
        kept = magnitude != 0
        near = kept & (error <= magnitude * (NEAR * SLACK))
        # Block by block, (blocks down, rows, blocks across, columns) to (blocks,).
        magnitudes, nears = tiles(magnitude, blocks), tiles(near, blocks)
        largest = magnitudes == magnitudes.amax((1, 3), keepdim=True)
        kept_in, near_in = (_marked(t) for t in (magnitudes != 0, nears))
        held = kept_in > 0
        self.totals.update(lost(prepared, x, got))
        if signal := _sum_of_squares(magnitude):
            self.errors.append(_sum_of_squares(error) / signal)
        self._count(
            near=near.sum(),
            claims=(held & (near_in >= CLAIM * kept_in)).sum(),
            maxima=(_marked(largest & nears) > 0).sum(),
            bytes=stored.nbytes,
            padded_bytes=padded_nbytes(stored) or 0,
        )

    def _count(self, **more: Tensor | int) -> None:
        self.totals.update({name: int(value) for name, value in more.items()})

    def figures(self) -> dict[str, float | None]:
        """The metrics of `report.formats`; None where one does not apply."""
        t = self.totals
        mse = sum(self.errors) / len(self.errors) if self.errors else None
        return {
            names.SQNR: decibels(mse) if mse else None,
            names.RELATIVE_MSE: mse,
            names.CLIPPED: _share(t["clipped"], t["kept"]),
            names.FLUSHED: _share(t["flushed"], t["kept"]),
            names.ZERO_SCALES: _share(t["zero_scales"], t["blocks"]),
            names.NEAR_FP8: _share(t["near"], t["kept"]),
            names.NEAR_FP8_BLOCKS: _share(t["claims"], t["blocks"]),
            names.NEAR_FP8_MAXIMA: _share(t["maxima"], t["blocks"]),
            names.BITS: 8 * t["bytes"] / t["values"],
            names.PADDED_BITS: 8 * t["padded_bytes"] / t["values"] if t["padded_bytes"] else None,
        }


def decibels(relative_mse: float) -> float:
    return 10 * math.log10(1 / relative_mse) if relative_mse else math.inf


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def tiles(x: Tensor, blocks: Blocks) -> Tensor:
    """A matrix (rows, columns), padded with zeros, as (blocks down, rows, blocks across, columns)."""
    matrix = blocks.matrix(x)
    high, wide = matrix.shape
    return matrix.view(high // blocks.rows, blocks.rows, wide // blocks.columns, blocks.columns)


def _marked(mask: Tensor) -> Tensor:
    """How many values of each block a mask in tiles marks; (blocks,)."""
    return mask.sum((1, 3)).reshape(-1)


def _sum_of_squares(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2


def padded_nbytes(stored: QuantizedTensor) -> int | None:
    """Bytes with the scales as the tensor core takes them; None for formats that it takes otherwise."""
    if stored.format.block[1] not in _TILED_WIDTHS or stored.scales.element_size() != 1:
        return None
    scales = swizzle_scales(stored.scales)
    return stored.nbytes - stored.scales.numel() + scales.numel()


class Study:
    """Tallies of every case on every kind of data; `rows` turns them into results."""

    def __init__(self, cases: Mapping[str, Case] = CASES, seed: int = 0) -> None:
        self.cases = cases
        self.seed = seed
        self.tallies: dict[tuple[str, str], Tally] = {}
        self._notes: dict[str, str] = {}
        self._tensors: dict[str, int] = {}

    def describe(self, data: str, note: str) -> None:
        """What is to be said of a kind of data."""
        self._notes[data] = note

    def add(self, data: str, x: Tensor) -> None:
        """One more tensor (rows, columns) of a kind of data, quantised under every case."""
        number = self._tensors[data] = self._tensors.get(data, 0) + 1
        for role, (name, case) in enumerate(self.cases.items()):
            tally = self.tallies.setdefault((name, data), Tally(case))
            tally.add(x, RandomKey(self.seed, layer=number, role=role))

    def rows(self, where: Mapping[str, str]) -> Iterator[Row]:
        """Results rows; `where` holds the columns that all of them share."""
        for (name, data), tally in self.tallies.items():
            for metric, value in tally.figures().items():
                yield Row(
                    experiment=names.EXPERIMENT,
                    setting=names.setting(name, data),
                    metric=metric,
                    value=value,
                    unit=names.UNITS[metric],
                    n=1,
                    note=self._note(metric, value, data, tally),
                    **where,
                )

    def not_run(self, data: str, reason: str, where: Mapping[str, str]) -> Iterator[Row]:
        """One row a case for data that could not be had."""
        for name in self.cases:
            yield Row(
                experiment=names.EXPERIMENT,
                setting=names.setting(name, data),
                metric=names.RELATIVE_MSE,
                value=None,
                unit=names.UNITS[names.RELATIVE_MSE],
                note=NOT_RUN + reason,
                **where,
            )

    def _note(self, metric: str, value: float | None, data: str, tally: Tally) -> str:
        notes = [self._notes.get(data, "")]
        if value is None:
            notes.append("does not apply: " + _WHY_NONE.get(metric, "no value is other than zero"))
        elif metric == names.SQNR and len(tally.errors) > 1:
            worst, best = (decibels(error) for error in (max(tally.errors), min(tally.errors)))
            notes.append(f"{worst:.2f} to {best:.2f} dB over {len(tally.errors)} tensors")
        return "; ".join(filter(None, notes))


_WHY_NONE = {
    names.SQNR: "no error at all, or no value other than zero",
    names.PADDED_BITS: "the tensor core takes these scales otherwise",
}
