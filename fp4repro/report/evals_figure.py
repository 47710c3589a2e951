"""The figure of evaluations: our accuracies beside chance, and the paper's differences with the
uncertainty that two bare figures leave.

Models in one arithmetic share a marker and colour; the vertical ticks are what a guess would score.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fp4repro.report.figures import MARKERS, two_panels
from fp4repro.report.published_accuracy import PAPER
from fp4repro.report.schema import Row

SPREAD = 0.6  # of a row's height, that its markers fill


def evals_figure(rows: Sequence[Row], paired: Sequence[Row], png: Path, svg: Path) -> None:
    """Draw both tables and write both files."""
    with two_panels(png, svg, figsize=(9.6, 5.4), width_ratios=(1, 1)) as (left, right):
        _accuracies(left, [row for row in rows if row.unit == "%" and row.value is not None])
        _paper(right, [row for row in paired if row.setting == PAPER])


def _accuracies(axes: Axes, rows: Sequence[Row]) -> None:
    palette = sns.color_palette("colorblind")
    names = list(dict.fromkeys(row.metric for row in rows))
    arms = list(dict.fromkeys(row.setting for row in rows))
    for number, arm in enumerate(arms):
        shift = SPREAD * (number / max(len(arms) - 1, 1) - 0.5)
        for place, row in enumerate(row for row in rows if row.setting == arm):
            height = names.index(row.metric) + shift
            style = {"color": palette[number % len(palette)], "marker": MARKERS[number % len(MARKERS)]}
            axes.plot([row.ci_low, row.ci_high], [height] * 2, color=style["color"], linewidth=1.2)
            label = arm if place == 0 else None
            axes.plot(row.value, height, linestyle="", markersize=5, label=label, **style)
    for place, name in enumerate(names):
        note = next(row.note for row in rows if row.metric == name)
        chance = re.search(r"^chance ([\d.]+) %", note)
        if chance:
            axes.plot([float(chance[1])] * 2, [place - 0.45, place + 0.45], color="0.4", linewidth=0.9)
    axes.set(
        title="Accuracy",
        xlabel="% (grey: a guess)",
        yticks=range(len(names)),
        yticklabels=[name.replace(".", "\n") for name in names],
        ylim=(len(names) - 0.5, -0.5),
    )
    axes.xaxis.set_major_locator(MaxNLocator(5))
    if arms:
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}
        axes.legend(frameon=False, fontsize="x-small", **below)


def _paper(axes: Axes, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row.metric.endswith(".difference")]
    names = [row.metric.removesuffix(".difference") for row in rows]
    for height, row in enumerate(rows):
        if row.ci_low is not None:
            axes.plot([row.ci_low, row.ci_high], [height] * 2, color="0.3", linewidth=1.2)
        known = row.ci_low is not None
        axes.plot(
            row.value, height, "o", color="0.2", markerfacecolor="0.2" if known else "none", markersize=4
        )
    axes.axvline(0, color="0.4", linewidth=0.8, zorder=0)
    axes.set(
        title="The paper: NVFP4 less FP8",
        xlabel="points (unpaired 95 %; open: none)",
        yticks=range(len(names)),
        yticklabels=names,
        ylim=(len(names) - 0.5, -0.5),
    )
    axes.tick_params(axis="y", labelsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(6))
