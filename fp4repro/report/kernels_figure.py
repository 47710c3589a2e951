"""The figure of speed and memory: NVFP4's speed-up against shape, and the 12B's memory by recipe.

Modelled speed-ups are lines, published and measured ones are points; the peak ratio is a grey dotted
line that says so, since it is a bound. Memory bars are stacked and hatched to read in grey.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import seaborn as sns
from matplotlib.axes import Axes

from fp4repro.report.figures import LINES, MARKERS, two_panels
from fp4repro.report.schema import Row

# Features in and out of the linears of Transformer Engine's guide, whose products are published.
PUBLISHED_WEIGHTS = {"o": 4096**2, "qkv": 4096 * 12288, "up": 4096 * 16384, "down": 4096 * 16384}
GROUPS = {"states": "", "weights": "//", "activations": ".."}
EMULATED = "emulated"
WIDTHS = (3.5, 1.2)  # a line that lies on another is still seen


def kernels_figure(tables: Mapping[str, Sequence[Row]], png: Path, svg: Path) -> None:
    """Draw the tables `roofline`, `kernels` and `memory`, and write both files."""
    with two_panels(png, svg, figsize=(9.2, 3.6), width_ratios=(1.2, 1)) as (left, right):
        _speedups(left, tables["roofline"], tables["kernels"])
        _memory(right, tables["memory"])


def _speedups(axes: Axes, roofline: Sequence[Row], kernels: Sequence[Row]) -> None:
    palette = sns.color_palette("colorblind")
    of_axes = {"xycoords": ("axes fraction", "data"), "fontsize": "x-small", "va": "bottom", "ha": "right"}
    shapes = [row for row in roofline if row.setting.startswith("shape/")]
    for number, device in enumerate(dict.fromkeys(row.device for row in shapes)):
        for style, metric, words in (
            (LINES[0], "kernel_to_bf16", "kernel"),
            (LINES[1], "with_quantisation_to_bf16", "with quantisation"),
        ):
            points = [
                (int(row.setting.removeprefix("shape/")) ** 2, row.value)
                for row in shapes
                if row.device == device and row.metric == metric
            ]
            label = f"{device}, {words} (modelled)"
            axes.plot(
                *zip(*points, strict=True),
                style,
                color=palette[number],
                label=label,
                linewidth=WIDTHS[number],
            )
        peak = next(r.value for r in roofline if r.device == device and r.metric == "peak_ratio_to_bf16")
        axes.axhline(peak, color=palette[number], linestyle=":", linewidth=0.8, alpha=0.7)
        axes.annotate(f"{device} peak ratio: a bound", (0.99, peak), **of_axes)
    points = [
        (weights, row.value)
        for row in roofline
        for name, weights in PUBLISHED_WEIGHTS.items()
        if row.setting == f"headline/te-b300-{name}-nvfp4-quantised" and row.metric.endswith("_to_bf16")
    ]
    label = "B300, with quantisation (published)"
    axes.plot(*zip(*points, strict=True), MARKERS[1], color="black", label=label, markersize=4)
    measured = [row for row in kernels if row.metric == "speedup_kernel_to_bf16" and _on_fp4_units(row)]
    for row in measured:
        axes.plot(_weights(row), row.value, MARKERS[0], color="red", markersize=4)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set(xscale="log", ylim=(0, None))
    axes.set(title="NVFP4 over BF16", xlabel="weights of the linear", ylabel="speed-up")
    axes.legend(frameon=False, fontsize="x-small", loc="upper left", bbox_to_anchor=(0, 0.97))


def _on_fp4_units(row: Row) -> bool:
    return row.setting.endswith("/nvfp4") and EMULATED not in row.note


def _weights(row: Row) -> int:
    """Weights of the linear that a benchmark's row multiplied, from its shape M x N x K."""
    m, n, k = (int(side) for side in row.note.partition(";")[0].split(" x "))
    return m * n if row.setting.split("/")[-2] == "wgrad" else n * k


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    palette = sns.color_palette("colorblind")
    modelled = [row for row in rows if row.unit == "GiB" and row.provenance == "modelled"]
    names = list(dict.fromkeys(row.setting for row in modelled))
    of = {(row.setting, row.metric): row.value for row in modelled}
    left = [0.0] * len(names)
    for number, (group, hatch) in enumerate(GROUPS.items()):
        widths = [of[name, group] for name in names]
        axes.barh(names, widths, left=left, color=palette[number], hatch=hatch, label=group, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    labels = [" ".join(name.split("/")[1:]).replace("ranks-", "on ") for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize="x-small")
    axes.invert_yaxis()
    axes.set(title="The 12B on one of N GPUs (modelled)", xlabel="GiB")
    axes.legend(frameon=False, fontsize="small", ncols=3, loc="upper left", bbox_to_anchor=(-0.2, -0.17))
