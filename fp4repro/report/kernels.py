"""Speed and memory for a reader: four Markdown tables, pure functions of their rows.

In each the provenance stands beside the figure, so that a peak, a model, a published and a measured
number cannot be taken for each other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fp4repro.report.markdown import aligned
from fp4repro.report.schema import NOT_RUN, Row

LEVELS = {
    "peak_ratio": "peak ratio (a bound, no result)",
    "kernel": "kernel only",
    "with_quantisation": "with quantisation",
    "end_to_end": "end to end",
}
BASELINES = ("bf16", "mxfp8")


def number(row: Row | None) -> str:
    """A cell: the figure, why there is none, or nothing."""
    if row is None:
        return ""
    if row.value is None:
        return "not run" if row.note.startswith(NOT_RUN) else row.note
    return f"{row.value:,.0f}" if abs(row.value) >= 1000 else f"{row.value:.3g}"


def pivot(rows: Iterable[Row], metrics: Sequence[str], first: str) -> list[str]:
    """One line a setting, one column a metric."""
    of: dict[str, dict[str, Row]] = {}
    for row in rows:
        of.setdefault(row.setting, {})[row.metric] = row
    lines = []
    for setting, found in of.items():
        kinds = dict.fromkeys(row.provenance if row.value is not None else "" for row in found.values())
        cells = [number(found.get(metric)) for metric in metrics]
        if any(cells):
            lines.append([setting, *cells, ", ".join(filter(None, kinds)) or "not run"])
    units: dict[str, set[str]] = {}
    for row in rows:
        units.setdefault(row.metric, set()).add(row.unit)
    header = [first, *(_column(m, units) for m in metrics), "provenance"]
    return list(aligned(header, lines)) if lines else []


def _column(metric: str, units: dict[str, set[str]]) -> str:
    """The metric with its unit, where it has one in all rows."""
    words, found = metric.replace("_", " "), units.get(metric, set())
    return f"{words} ({found.pop()})" if len(found) == 1 and found != {"1"} else words


def headline(rows: Sequence[Row]) -> list[str]:
    """NVFP4's speed-ups by device and level, what a reader wants first."""
    lines = []
    whole = [row for row in rows if row.setting.startswith("headline/")]
    for device in dict.fromkeys(row.device for row in whole):
        for level, words in LEVELS.items():
            by_setting: dict[str, dict[str, Row]] = {}
            for row in whole:
                metric, _, base = row.metric.rpartition("_to_")
                if row.device == device and metric == level:
                    by_setting.setdefault(row.setting.removeprefix("headline/"), {})[base] = row
            for setting, cells in by_setting.items():
                any_row = next(iter(cells.values()))
                provenance = any_row.provenance if any_row.value is not None else any_row.note
                values = [number(cells.get(base)) for base in BASELINES]
                lines.append([device, words, *(f"{v}x" if v and v[0].isdigit() else v for v in values)])
                lines[-1] += [setting, provenance]
    return list(
        aligned(["GPU", "speed-up of NVFP4", "over BF16", "over MXFP8", "of what", "provenance"], lines)
    )


def roofline_markdown(rows: Sequence[Row]) -> str:
    checks = [row for row in rows if row.setting.startswith("check/")]
    roles = {row.setting: row.note for row in checks if row.metric == "error"}
    units = {row.setting: row.unit for row in checks if row.metric == "published"}
    named = [
        replace(
            row, setting=f"{row.setting.removeprefix('check/')} ({roles[row.setting]}, {units[row.setting]})"
        )
        for row in checks
    ]
    errors = [row for row in rows if row.setting.startswith("errors/")]
    factors = [row for row in rows if row.setting == "factors"]
    return _document(
        "What NVFP4 gains, and how far the model can be trusted",
        headline(rows),
        "The levels are more than three times apart: a peak ratio is never a speed-up. Modelled rows are of "
        "the roofline (docs/kernels.md), published ones of others' measurements in their own settings.",
        "## The model against published measurements",
        pivot(named, ["published", "modelled", "error"], "row"),
        pivot(errors, ["median_absolute_error"], "group"),
        "## Factors",
        list(
            aligned(
                ["factor", "value", "how"],
                [[r.metric, f"{r.value:.3g}{' s' if r.unit == 's' else ''}", r.note] for r in factors],
            )
        ),
    )


def kernels_markdown(rows: Sequence[Row]) -> str:
    sums = [row for row in rows if "/all/" in row.setting]
    single = [row for row in rows if row not in sums and not row.setting.endswith("/native")]
    native = [row for row in rows if row.setting.endswith("/native")]
    metrics = ["kernel_time", "quantised_time", "rate", "share_of_peak", "error", "error_of_kernel"]
    sum_metrics = [f"speedup_{a}_{m}" for a in ("kernel", "quantised") for m in ("geometric_mean", "sum")]
    notes = dict.fromkeys(row.note.split("; ")[-1] for row in single if row.value is not None)
    return _document(
        "Products of a model's linears",
        pivot(single, [m for m in metrics if any(r.metric == m for r in single)], "product"),
        "## Over the whole model",
        pivot(sums, [m for m in sum_metrics if any(r.metric == m for r in sums)], "format"),
        "\n".join(f"- {note}" for note in list(notes)[:3]),
        f"{len(native)} products on FP8 and FP4 units: {native[0].note}." if native else "",
        _where(rows),
    )


def casts_markdown(rows: Sequence[Row]) -> str:
    return _document(
        "Quantising operands, beside a copy",
        pivot(rows, ["time", "rate", "share_of_copy"], "what"),
        f"{rows[0].note}.",
        _where(rows),
    )


def memory_markdown(rows: Sequence[Row]) -> str:
    operands = [row for row in rows if row.setting.startswith("operand ")]
    small = [row for row in rows if row.unit in ("MiB", "%")]
    large = [row for row in rows if row.unit == "GiB"]
    sizes = ["one_orientation", "padded", "both_orientations"]
    return _document(
        "Memory",
        "## Operands, bytes a value of real packed tensors",
        pivot(operands, [*sizes, *(f"nvfp4_share_{size}" for size in sizes)], "matrix"),
        "## Small models: the step measured, beside the account",
        pivot(small, ["peak", "account", "error", "saved_for_backward"], "model"),
        "## One GPU",
        pivot(large, ["states", "weights", "activations", "total", "peak"], "model, recipe, GPUs"),
        "\n".join(f"- {note}." for note in dict.fromkeys(row.note for row in large)),
    )


def _where(rows: Sequence[Row]) -> str:
    row = rows[0]
    return f"Device {row.device}; torch {row.torch}; commit {row.commit}."


def _document(title: str, *parts: str | Sequence[str]) -> str:
    texts = [part if isinstance(part, str) else "\n".join(part) for part in parts]
    return "\n\n".join(filter(None, [f"# {title}", *texts])) + "\n"


MARKDOWN: dict[str, Callable[[Sequence[Row]], str]] = {
    "kernels": kernels_markdown,
    "casts": casts_markdown,
    "roofline": roofline_markdown,
    "memory": memory_markdown,
}
