"""The sensitivity study's figure: error by block, and what each choice of BF16 blocks leaves of it."""

from collections.abc import Sequence
from pathlib import Path

import seaborn as sns
from matplotlib.axes import Axes

from fp4repro.report import sensitivity_metrics as names
from fp4repro.report.by_model import Figures
from fp4repro.report.figures import LINES, MARKERS, panels
from fp4repro.report.schema import Row
from fp4repro.report.sensitivity import blocks_of, models_of


def sensitivity_figure(rows: Sequence[Row], png: Path, svg: Path) -> None:
    """Draw the study's tables, a row a model, and write both files."""
    models = {m: of for m, of in models_of(rows).items() if of["none", names.ERROR].value is not None}
    count = max(len(models), 1)
    with panels(png, svg, count, 2, figsize=(8.4, 3.2 * count), width_ratios=(1.4, 1)) as axes:
        for (left, right), (model, of) in zip(axes, models.items(), strict=False):
            _blocks(left, model, of)
            _choices(right, of)


def _blocks(axes: Axes, model: str, of: Figures) -> None:
    blocks, palette = blocks_of(of), sns.color_palette("colorblind")
    curves = {
        "own wgrad, given exact operands": names.LOCAL["wgrad"],
        "model, it alone quantised": names.ALONE_ERROR,
    }
    for number, (label, metric) in enumerate(curves.items()):
        style = {"color": palette[number], "linestyle": LINES[number], "marker": MARKERS[number]}
        heights = [of[block, metric].value for block in blocks]
        axes.plot(range(len(blocks)), heights, label=label, markersize=3.5, linewidth=1.2, **style)
    axes.set(
        title=f"Gradient error by block, {model}", xlabel="block", ylabel="relative error", ylim=(0, None)
    )
    axes.legend(frameon=False, fontsize="small")


def _choices(axes: Axes, of: Figures) -> None:
    places = [place for place in names.CHOICES if (place, names.ERROR) in of]
    values = [of[place, names.ERROR].value for place in places]
    spreads = [row.value if (row := of.get((place, names.NOISE))) else 0 for place in places]
    axes.errorbar(values, range(len(places)), xerr=spreads, fmt="o", color=sns.color_palette("colorblind")[0])
    axes.set(title="Blocks left in BF16", xlabel="gradient error of the model")
    axes.set(yticks=range(len(places)), yticklabels=places, ylim=(len(places) - 0.5, -0.5))
    axes.grid(axis="y", color="0.9", linewidth=0.6)
