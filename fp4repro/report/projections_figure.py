"""The figure of LoRA-SVD: errors against the law of captured energy, and what a stale basis costs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes

from fp4repro.report import projection_tables as names
from fp4repro.report.figures import MARKERS, two_panels
from fp4repro.report.schema import Row


def projections_figure(rows: Sequence[Row], png: Path, svg: Path) -> None:
    """Draw the study's table and write both files."""
    parts = names.by_part(rows)
    with two_panels(png, svg, figsize=(8.4, 3.4), width_ratios=(1.2, 1)) as (left, right):
        _law(left, parts)
        _stale(right, parts.get(names.STALE, {}))


def _law(axes: Axes, parts: dict) -> None:
    energy = np.linspace(0, 1, 200)
    axes.plot(energy, np.sqrt(1 - energy), color="0.4", linewidth=1, label="sqrt(1 - energy)", zorder=0)
    palette = sns.color_palette("colorblind")
    cases = parts.get(names.RATIO_LAW, {})
    spectra = list(dict.fromkeys(case.partition("/")[0] for case in cases))
    groups = {
        spectrum: [of for c, of in cases.items() if c.startswith(spectrum + "/")] for spectrum in spectra
    }
    groups |= {"trained weights": list(parts.get(names.TRAINED, {}).values())}
    for number, (label, group) in enumerate(groups.items()):
        if group:
            axes.plot(
                [of[names.ENERGY].value for of in group],
                [of[names.OUTPUT_RATIO].value for of in group],
                label=label,
                marker=MARKERS[number % len(MARKERS)],
                color=palette[number % len(palette)],
                linestyle="",
                markersize=5,
            )
    axes.set(title="Error of the output", xlabel="energy of W in BF16", ylabel="over rank 0")
    axes.legend(frameon=False, fontsize="small")


def _stale(axes: Axes, cases: dict) -> None:
    palette = sns.color_palette("colorblind")
    for number, kind in enumerate(("none", "stale", "fresh")):
        points = sorted(
            (float(case.partition("/")[0]), of[names.OUTPUT].value)
            for case, of in cases.items()
            if case.endswith("/" + kind)
        )
        if points:
            axes.plot(*zip(*points, strict=True), label=kind, marker=MARKERS[number], color=palette[number])
    axes.set(title="Basis after W moved", xlabel="moved, share of its norm", ylabel="error of the output")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="small", title="basis")
