"""The format study's figure: error of each format on each kind of data, and what it flushes to zero.

One row a format, one marker a kind of data: filled for synthetic data, open for tensors of a trained
model, so that the figure reads in grey too.
"""

from collections.abc import Sequence
from pathlib import Path

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fp4repro.report import formats
from fp4repro.report.figures import MARKERS, two_panels
from fp4repro.report.schema import Row

SYNTHETIC = 3  # kinds of data that come first in the study, drawn filled
SPREAD = 0.6  # of a row's height, that its markers fill


def formats_figure(rows: Sequence[Row], png: Path, svg: Path) -> None:
    """Draw the study's table and write both files."""
    of = formats.by_format_and_data(rows)
    names = formats.distinct(key[0] for key in of)
    height = 1.2 + 0.27 * len(names)
    with two_panels(png, svg, figsize=(8.4, height), sharey=True, width_ratios=(1.3, 1)) as (left, right):
        _panel(left, of, names, formats.SQNR, 1)
        left.set(title="Signal to quantisation noise", xlabel="dB (right is better)")
        left.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
        _panel(right, of, names, formats.FLUSHED, 100)
        right.set(title="Flushed to zero", xlabel="% of values that are not zero")
        right.set(xlim=(-2, 102))
        right.legend(frameon=False, fontsize="small", loc="lower right")  # FP8 flushes next to nothing


def _panel(axes: Axes, of: dict, names: Sequence[str], metric: str, factor: float) -> None:
    palette = sns.color_palette("colorblind")
    kinds = formats.distinct(key[1] for key in of)
    for number, data in enumerate(kinds):
        shift = SPREAD * (number / max(len(kinds) - 1, 1) - 0.5)  # so that markers do not hide each other
        points = [
            (factor * row.value, height + shift)
            for height, name in enumerate(names)
            if (row := of.get((name, data, metric))) is not None and row.value is not None
        ]
        values, heights = zip(*points, strict=True) if points else ((), ())
        axes.plot(
            values,
            heights,
            label=data,
            marker=MARKERS[number % len(MARKERS)],
            color=palette[number % len(palette)],
            markerfacecolor=None if number < SYNTHETIC else "none",
            linestyle="",
            markersize=5,
        )
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6))
