"""The ablation figure: a forest plot of gaps with intervals, and the loss curves behind them.

The left panel has an entry a line, grouped as in the table: each seed's gap as a tick, the mean and its
95 % interval as a dot and a line. The right panel has the training loss of each entry by step, mean over
seeds; for branches less that of its baseline, which saw the same batches.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes

from fp4repro.ablations import Ablation
from fp4repro.report.entries import MARGIN_METRIC
from fp4repro.report.figures import LINES, MARKERS, two_panels
from fp4repro.report.gaps import WINDOW, Outcomes
from fp4repro.report.plan import BRANCHES
from fp4repro.report.schema import Row
from fp4repro.report.tables import GAP


def ablations_figure(
    rows: Sequence[Row], ablations: Mapping[str, Ablation], outcomes: Outcomes, png: Path, svg: Path
) -> None:
    """Draw one protocol's figure and write both files."""
    names = list(outcomes.plan.entries)
    height = 1.6 + 0.2 * len(names)
    with two_panels(png, svg, figsize=(9.6, height), width_ratios=(1.2, 1)) as (left, right):
        _forest(left, rows, ablations, outcomes, names)
        _curves(right, ablations, outcomes, names)


def _styles(ablations: Mapping[str, Ablation], names: Sequence[str]) -> dict[str, dict]:
    """A colour and a marker a group, so that groups can be told apart in grey."""
    groups = list(dict.fromkeys(ablations[name].group for name in names))
    palette = sns.color_palette("colorblind")
    of = {
        group: {"color": palette[index % len(palette)], "marker": MARKERS[index % len(MARKERS)]}
        for index, group in enumerate(groups)
    }
    return {name: of[ablations[name].group] for name in names}


def _forest(
    axes: Axes,
    rows: Sequence[Row],
    ablations: Mapping[str, Ablation],
    outcomes: Outcomes,
    names: Sequence[str],
) -> None:
    of = {(row.setting, row.metric): row for row in rows if row.provenance != "published"}
    styles = _styles(ablations, names)
    for height, name in enumerate(names):
        baseline, style = ablations[name].baseline, styles[name]
        row = of.get((f"{outcomes.plan.protocol}/{name}", GAP + baseline))
        if row is None or row.value is None:
            axes.annotate(
                "not run or diverged", (0, height), xytext=(4, 0), textcoords="offset points", va="center"
            )
            continue
        if row.ci_low is not None:
            axes.plot([row.ci_low, row.ci_high], [height] * 2, color=style["color"], linewidth=1.6)
        gaps = list(outcomes.gaps(name, baseline).values())
        axes.plot(gaps, [height] * len(gaps), "|", color=style["color"], markersize=7)
        axes.plot(row.value, height, linestyle="", markersize=4.5, **style)
    axes.axvline(0, color="0.4", linewidth=0.8, zorder=0)
    margin = of[f"{outcomes.plan.protocol}/all", MARGIN_METRIC].value
    axes.axvspan(-margin, margin, color="0.9", linewidth=0, zorder=-1)
    axes.set(
        title="Gap to the baseline",
        xlabel="% (positive is worse; ticks: seeds; grey: too small to matter)",
        yticks=range(len(names)),
        yticklabels=names,
        ylim=(len(names) - 0.5, -0.5),
    )


def _curves(axes: Axes, ablations: Mapping[str, Ablation], outcomes: Outcomes, names: Sequence[str]) -> None:
    styles, branches = _styles(ablations, names), outcomes.plan.protocol == BRANCHES
    drawn: dict[str, int] = {}
    for name in names:
        pairs = outcomes.pairs(name, ablations[name].baseline)
        if not pairs:
            continue
        losses = np.mean(
            [_smooth(a.losses - b.losses if branches else a.losses) for a, b in pairs.values()], axis=0
        )
        group = ablations[name].group
        line = LINES[drawn.setdefault(group, 0) % len(LINES)]
        label = None if drawn[group] else group
        drawn[group] += 1
        steps = np.arange(1, len(losses) + 1)
        every = max(1, len(losses) // 5)
        axes.plot(
            steps,
            losses,
            line,
            linewidth=1,
            label=label,
            markersize=3.5,
            markevery=(len(drawn) * every // 8, every),
            **styles[name],
        )
    title = "Training loss less the baseline's" if branches else "Training loss"
    axes.set(title=title, xlabel=f"steps (means of {WINDOW})", ylabel="nats per token")
    if drawn:
        axes.legend(frameon=False, fontsize="x-small")


def _smooth(values: np.ndarray) -> np.ndarray:
    window = min(WINDOW, len(values))
    return np.convolve(values, np.full(window, 1 / window), mode="valid")
