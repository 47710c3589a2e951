"""The full-stack figure: the gap of each module with its interval, and its memory beside the baseline's."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import seaborn as sns
from matplotlib.axes import Axes

from fp4repro.ablations import Ablation
from fp4repro.report.figures import MARKERS, two_panels
from fp4repro.report.fullstack import ALL, MEMORY, SUM_OF_SINGLES
from fp4repro.report.schema import Row
from fp4repro.report.tables import GAP

Found = Mapping[tuple[str, str], Row]


def fullstack_figure(rows: Sequence[Row], entries: Mapping[str, Ablation], png: Path, svg: Path) -> None:
    """Draw the table and write both files; entries of both protocols stand one below the other."""
    of = {(row.setting, row.metric): row for row in rows if row.provenance != "published"}
    settings = list(dict.fromkeys(s for s, _ in of if s.partition("/")[2] in entries))
    height = 1.6 + 0.2 * len(settings)
    with two_panels(png, svg, figsize=(9.4, height), width_ratios=(1.3, 1), sharey=True) as (left, right):
        _gaps(left, of, entries, settings)
        _memory(right, of, entries, settings)
        left.set(yticks=range(len(settings)), yticklabels=settings, ylim=(len(settings) - 0.5, -0.5))


def _gaps(axes: Axes, of: Found, entries: Mapping[str, Ablation], settings: Sequence[str]) -> None:
    groups = list(dict.fromkeys(entry.group for entry in entries.values()))
    palette = sns.color_palette("colorblind")
    for height, setting in enumerate(settings):
        name = setting.partition("/")[2]
        row = of.get((setting, GAP + entries[name].baseline))
        colour = palette[groups.index(entries[name].group) % len(palette)]
        if row is None or row.value is None:
            axes.annotate("not run or diverged", (0, height), (4, 0), textcoords="offset points", va="center")
            continue
        if row.ci_low is not None:
            axes.plot([row.ci_low, row.ci_high], [height] * 2, color=colour, linewidth=1.6)
        axes.plot(row.value, height, "o", color=colour, markersize=5)
        total = of.get((setting, SUM_OF_SINGLES))
        if name == ALL and total is not None and total.value is not None:
            axes.plot(total.value, height, "|", color="0.2", markersize=12, label="sum of the single gaps")
            axes.legend(frameon=False, fontsize="x-small")
    axes.axvline(0, color="0.4", linewidth=0.8, zorder=0)
    axes.set(title="Gap to the baseline", xlabel="% (positive is worse)")


def _memory(axes: Axes, of: Found, entries: Mapping[str, Ablation], settings: Sequence[str]) -> None:
    palette = sns.color_palette("colorblind")
    for number, (metric, label) in enumerate(MEMORY.items()):
        points = []
        for height, setting in enumerate(settings):
            protocol, _, name = setting.partition("/")
            row, base = (of.get((s, metric)) for s in (setting, f"{protocol}/{entries[name].baseline}"))
            if row and base and row.value is not None and base.value:
                points.append((100 * row.value / base.value, height))
        style = {"marker": MARKERS[number], "color": palette[number], "linestyle": "", "markersize": 5}
        sides = zip(*points, strict=True) if points else ((), ())
        axes.plot(*sides, label=label.partition(",")[0], **style)
    axes.axvline(100, color="0.4", linewidth=0.8, zorder=0)
    axes.set(title="Memory", xlabel="% of the baseline's")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize="small")
