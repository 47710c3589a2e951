"""The figure of attention's training control: losses and gaps, a mark a seed."""

from collections.abc import Sequence
from pathlib import Path

import seaborn as sns

from fp4repro.report.attention_control import by_setting
from fp4repro.report.attention_tables import LOSS, LOSS_GAP
from fp4repro.report.figures import MARKERS, two_panels
from fp4repro.report.schema import Row

TITLES = {LOSS: "Validation loss", LOSS_GAP: "Gap to high precision"}


def attention_control_figure(rows: Sequence[Row], png: Path, svg: Path) -> None:
    """Draw the study's table and write both files; a run that diverged has no mark, and the line says so."""
    found = by_setting(rows)
    palette = sns.color_palette("colorblind")
    with two_panels(png, svg, figsize=(9.4, 1.4 + 0.3 * len(found)), sharey=True) as panels:
        for axes, (metric, title) in zip(panels, TITLES.items(), strict=True):
            for height, of in enumerate(found.values()):
                for number, (seed, row) in enumerate(of.get(metric, {}).items()):
                    style = {
                        "color": palette[number % len(palette)],
                        "marker": MARKERS[number % len(MARKERS)],
                    }
                    if row.value is not None:
                        axes.plot(row.value, height, linestyle="", markersize=5, **style)
                    else:
                        place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": "small"}
                        axes.annotate(f"seed {seed} diverged", (0.7 - 0.25 * number, height), **place)
            axes.set(title=title, xlabel="nats per byte")
        panels[0].set(yticks=range(len(found)), yticklabels=list(found), ylim=(len(found) - 0.5, -0.5))
        panels[1].axvline(0, color="0.4", linewidth=0.8, zorder=0)
