"""The gradient study's figure: where in the model wgrad errs, and what more draws do to the error.

A row a model. Left: relative error of wgrad, recipes down, blocks across. Right: error of the mean of
n draws by rounding dy in dgrad, against n, beside the slope of 1/sqrt(n).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, LogLocator

from fp4repro.report import fidelity_metrics as names
from fp4repro.report.by_model import Figures
from fp4repro.report.fidelity import models_of, rounding_draws
from fp4repro.report.figures import LINES, MARKERS, panels
from fp4repro.report.schema import Row

CURVES = ("nvfp4", "sr_headroom", "mxfp4", "no_sr")
_ERROR = names.metric("wgrad", names.ERROR)


def fidelity_figure(rows: Sequence[Row], png: Path, svg: Path) -> None:
    """Draw the study's tables and write both files."""
    models = {
        name: of for name, of in models_of(rows).items() if any(r.value is not None for r in of.values())
    }
    recipes = max((len({r for r, m in of if m == _ERROR}) for of in models.values()), default=1)
    height = max(1.2 + 0.17 * recipes, 3)
    count = max(len(models), 1)
    with panels(png, svg, count, 2, figsize=(8.8, height * count), width_ratios=(1.6, 1)) as axes:
        for (left, right), (model, of) in zip(axes, models.items(), strict=False):
            _heat(left, model, of)
            _bias(right, of)


def _heat(axes: Axes, model: str, of: Figures) -> None:
    start = f"{_ERROR}@block-"
    blocks = sorted({m for _, m in of if m.startswith(start)})
    recipes = list(dict.fromkeys(r for r, m in of if m == _ERROR))
    values = [[row.value if (row := of.get((r, b))) else np.nan for b in blocks] for r in recipes]
    image = axes.imshow(np.array(values, float), aspect="auto", cmap="cividis", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, pad=0.01)
    every = max(1, len(blocks) // 10)
    axes.set(title=f"Error of wgrad, {model}", xlabel="block")
    axes.set_xticks(range(0, len(blocks), every), [str(int(b.removeprefix(start))) for b in blocks[::every]])
    axes.set_yticks(range(len(recipes)), recipes, fontsize=6.5)


def _bias(axes: Axes, of: Figures) -> None:
    draws, palette = rounding_draws(of, "dgrad"), sns.color_palette("colorblind")
    for number, recipe in enumerate(CURVES):
        points = [(n, of.get((recipe, names.after_draws("dgrad", names.ROUNDING, n)))) for n in draws]
        points = [(n, row.value) for n, row in points if row is not None and row.value]
        if points:
            style = {"color": palette[number], "linestyle": LINES[number], "marker": MARKERS[number]}
            axes.plot(*zip(*points, strict=True), label=recipe, linewidth=1.4, markersize=4.5, **style)
            if recipe == "nvfp4":
                ideal = [points[0][1] / (n / points[0][0]) ** 0.5 for n, _ in points]
                axes.plot([n for n, _ in points], ideal, color="0.6", linewidth=3, alpha=0.5, zorder=0)
    axes.set(title="Mean error of n draws, dgrad", xlabel="draws (grey: 1/sqrt(n))")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(draws, map(str, draws))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.minorticks_off()
    if axes.lines:
        axes.legend(frameon=False, fontsize="small")
