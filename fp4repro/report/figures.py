"""The pretraining figure: loss curves, and gaps to BF16 with each seed's point and the interval.

Recipes differ in colour (seaborn's colour-blind palette), line style and marker, so the figure
reads in grey too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # no display is needed, and none is looked for

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from fp4repro.errors import Fp4ReproError
from fp4repro.report import figure_files
from fp4repro.report.runs import Runs, read_curve
from fp4repro.report.schema import VALIDATION_LOSS, Row
from fp4repro.report.tables import BASELINES, GAP, gaps_by_seed

LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
RC = figure_files.RC | {
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def pretrain_figure(runs: Runs, rows: Sequence[Row], png: Path, svg: Path) -> None:
    """Draw the runs' curves and the table's gaps, and write both files."""
    with two_panels(png, svg, figsize=(8.4, 3.4), width_ratios=(1.25, 1)) as (left, right):
        _curves(left, runs)
        _gaps(right, runs, rows)


@contextmanager
def panels(png: Path, svg: Path, rows: int, columns: int, **layout: object) -> Iterator[np.ndarray]:
    """Axes (rows, columns) in the style of all figures; PNG, SVG and, beside the SVG, PDF are written when
    the block ends well."""
    with sns.axes_style("ticks"), sns.plotting_context("paper", font_scale=1.1), plt.rc_context(RC):
        figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **layout)
        try:
            yield axes
            sns.despine(figure)
            figure_files.save(figure, png, svg)
        finally:
            plt.close(figure)


@contextmanager
def two_panels(png: Path, svg: Path, **layout: object) -> Iterator[tuple[Axes, Axes]]:
    """`panels` with two side by side."""
    with panels(png, svg, 1, 2, **layout) as axes:
        yield tuple(axes[0])


def _style(runs: Runs, recipe: str) -> dict:
    index = runs.recipes.index(recipe)
    palette = sns.color_palette("colorblind")
    return {
        "color": palette[index % len(palette)],
        "linestyle": LINES[index % len(LINES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def _curves(axes: Axes, runs: Runs) -> None:
    """Mean validation loss over seeds against tokens, with the range of the seeds as a band."""
    for place, recipe in enumerate(runs.recipes):
        curves = [
            read_curve(runs.folders[recipe, seed], "tokens", VALIDATION_LOSS)
            for seed in runs.values(recipe, VALIDATION_LOSS)
        ]
        if not curves:
            continue
        tokens = curves[0][0]
        if any(other != tokens for other, _ in curves):
            raise Fp4ReproError(f"the seeds of {recipe} were validated at different steps: run them again")
        losses = np.array([loss for _, loss in curves])  # (seeds, points)
        style, step = _style(runs, recipe), max(1, len(tokens) // 6)
        axes.plot(
            tokens,
            losses.mean(0),
            label=recipe,
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            markevery=(place * step // len(runs.recipes), step),
            linewidth=1.4,
            **style,
        )
        axes.fill_between(tokens, losses.min(0), losses.max(0), color=style["color"], alpha=0.12, linewidth=0)
    axes.set(title="Validation loss", xlabel="training tokens", ylabel="nats per token")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axes.lines:
        axes.legend(frameon=False, handlelength=3)


def _gaps(axes: Axes, runs: Runs, rows: Sequence[Row]) -> None:
    """Each recipe's gap to the scale's first baseline: a point a seed, the mean, its interval."""
    baseline = next((name for name in BASELINES if name in runs.recipes), BASELINES[0])
    mean = {
        row.setting: row for row in rows if row.metric == GAP + baseline and row.provenance != "published"
    }
    names = [recipe for recipe in runs.recipes if recipe != baseline]
    for height, recipe in enumerate(names):
        row, style = mean.get(recipe), _style(runs, recipe)
        if row is None or row.value is None:
            axes.annotate(
                "not run or diverged",
                (0, height),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
            continue
        gaps = list(gaps_by_seed(runs, recipe, baseline).values())
        axes.plot(
            gaps,
            [height + 0.22] * len(gaps),
            marker=style["marker"],
            color=style["color"],
            linestyle="",
            markersize=4,
            markerfacecolor="none",
        )
        if row.ci_low is not None:
            axes.plot([row.ci_low, row.ci_high], [height] * 2, color=style["color"], linewidth=2)
        axes.plot(row.value, height, marker=style["marker"], color=style["color"], markersize=7)
    axes.axvline(0, color="0.4", linewidth=0.8, zorder=0)
    axes.set(
        title=f"Gap to {baseline.upper()}",
        xlabel="% (positive is worse; open: each seed)",
        yticks=range(len(names)),
        yticklabels=names,
        ylim=(len(names) - 0.5, -0.5),
    )
    axes.xaxis.set_major_locator(MaxNLocator(6))
