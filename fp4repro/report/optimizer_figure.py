"""Figures of the optimizer's studies: one pair of panels each, drawn from the study's table."""

from collections.abc import Callable, Sequence
from pathlib import Path

import seaborn as sns
from matplotlib.axes import Axes

from fp4repro.report import optimizer_tables as tables
from fp4repro.report.figures import LINES, MARKERS, two_panels
from fp4repro.report.formats import distinct
from fp4repro.report.schema import VALIDATION_LOSS, Row

Found = dict[str, dict[str, list[Row]]]


def optimizer_figure(rows: Sequence[Row], png: Path, svg: Path) -> None:
    """Draw the study that the rows are of, and write both files."""
    found = tables.by_setting(rows)
    draw, height = _DRAW[tables.of_experiment(rows)]
    with two_panels(png, svg, figsize=(9.4, height)) as (left, right):
        draw(left, right, found)


def _states(left: Axes, right: Axes, found: Found) -> None:
    _bars(left, found, tables.UPDATE_ERROR, "Error of the next update", logarithmic=True)
    _bars(right, found, VALIDATION_LOSS, "Validation loss of the tiny model (nats/byte)", logarithmic=False)


def _schulz(left: Axes, right: Axes, found: Found) -> None:
    _by_spectrum(left, found, tables.SIGMA_MAX, "Largest singular value (1 is exact)", logarithmic=True)
    _by_spectrum(right, found, tables.COSINE_POLAR, "Cosine to the exact polar factor", logarithmic=False)


def _growth(left: Axes, right: Axes, found: Found) -> None:
    _lines(left, found, "sum", tables.RMS_ERROR, "terms of the sum K", "Root mean square error")
    _lines(right, found, "chain", tables.RELATIVE_ERROR, "products in the chain", "Relative error")


_DRAW: dict[str, tuple[Callable[[Axes, Axes, Found], None], float]] = {
    "optimizer_states": (_states, 4.4),
    "newton_schulz": (_schulz, 4.0),
    "error_growth": (_growth, 3.2),
}


def _values(found: Found, name: str, metric: str) -> list[float]:
    return [row.value for row in found[name].get(metric, []) if row.value is not None]


def _bars(axes: Axes, found: Found, metric: str, title: str, logarithmic: bool) -> None:
    """A mark a seed and setting; a setting without a value says so."""
    names = [name for name in found if metric in found[name]]
    color = sns.color_palette("colorblind")[0]
    for height, name in enumerate(names):
        values = _values(found, name, metric)
        axes.plot(values, [height] * len(values), marker="o", color=color, linestyle="", markersize=5)
        if len(values) < len(found[name][metric]):
            axes.annotate(
                "not run or diverged",
                (0.02, height),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize="small",
            )
    axes.set(title=title, yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    axes.set_xscale("log" if logarithmic else "linear")
    axes.grid(axis="y", color="0.9", linewidth=0.6)


def _by_spectrum(axes: Axes, found: Found, metric: str, title: str, logarithmic: bool) -> None:
    methods = distinct(name.partition("/")[0] for name in found)
    palette = sns.color_palette("colorblind")
    for number, spectrum in enumerate(distinct(name.partition("/")[2] for name in found)):
        points = [
            (value, height)
            for height, method in enumerate(methods)
            for value in _values(found, f"{method}/{spectrum}", metric)
        ]
        xs, heights = zip(*points, strict=True) if points else ((), ())
        style = {"marker": MARKERS[number], "color": palette[number], "linestyle": "", "markersize": 5}
        axes.plot(xs, heights, label=spectrum, **style)
    axes.set(title=title, yticks=range(len(methods)), yticklabels=methods, ylim=(len(methods) - 0.5, -0.5))
    axes.set_xscale("log" if logarithmic else "linear")
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    if not logarithmic:
        axes.legend(frameon=False, fontsize="small")


def _lines(axes: Axes, found: Found, kind: str, metric: str, xlabel: str, title: str) -> None:
    palette = sns.color_palette("colorblind")
    for number, gemm in enumerate(distinct(name.partition("/")[0] for name in found)):
        names = [name for name in found if name.startswith(f"{gemm}/{kind}-")]
        xs = [int(name.rpartition("-")[2]) for name in names]
        ys = [_values(found, name, metric)[0] for name in names]
        style = {"marker": MARKERS[number], "linestyle": LINES[number], "color": palette[number]}
        axes.plot(xs, ys, label=gemm, **style)
        axes.plot(xs, [ys[0] * (x / xs[0]) ** 0.5 for x in xs], color="0.6", linewidth=0.8, zorder=0)
    axes.set(title=title, xlabel=f"{xlabel} (grey: its square root)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend(frameon=False)
