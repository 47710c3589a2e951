"""The sensitivity figure: a heat map of errors, what is lowered down, data across.

The left panel shows O, the right dQ, the gradient that every backward product but two reaches. Each cell
holds its number, so the figure reads in grey too.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import seaborn as sns

from fp4repro.report import attention_tables as tables
from fp4repro.report.figures import two_panels
from fp4repro.report.schema import Row

MOST = 0.5  # the colour scale's end: half of a result is error


def attention_figure(rows: Sequence[Row], png: Path, svg: Path) -> None:
    """Draw the study's table and write both files."""
    of = tables.by_data(rows)
    data = list(of)
    lowered = tables.lowered_in(of[data[0]])
    size = (4.2 + 1.1 * len(data), 1.6 + 0.27 * len(lowered))
    with two_panels(png, svg, figsize=size, sharey=True) as panels:
        for axes, metric in zip(panels, (tables.ERROR_O, tables.ERROR_DQ), strict=True):
            cells = [[of[d].get((name, metric)) for d in data] for name in lowered]
            values = np.array(
                [[np.nan if c is None or c.value is None else c.value for c in r] for r in cells]
            )
            sns.heatmap(
                values,
                ax=axes,
                vmin=0,
                vmax=MOST,
                cmap="rocket_r",
                annot=True,
                fmt=".2f",
                annot_kws={"size": 7},
                cbar=metric == tables.ERROR_DQ,
                xticklabels=data,
                yticklabels=lowered,
            )
            axes.set_title(f"Relative error of {tables.ERRORS[metric]}")
            axes.tick_params(axis="x", labelrotation=40, labelsize=8)
            axes.tick_params(axis="y", labelrotation=0, labelsize=8)
            for label in axes.get_xticklabels():
                label.set_horizontalalignment("right")
