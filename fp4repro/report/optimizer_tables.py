"""Optimizer states, Newton-Schulz and error growth for a reader: metrics, and their Markdown.

A row's setting is `<what>/<on what>`: a codec's name, a schedule over a spectrum, a product over a length, or
a run's seed. The Markdown has one line for each and a column a metric; means are over
seeds where there are several.
"""

from collections.abc import Sequence
from statistics import mean

from fp4repro.errors import Fp4ReproError
from fp4repro.report.formats import distinct
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import NOT_RUN, VALIDATION_LOSS, Row
from fp4repro.report.tables import origin

EXPERIMENTS = ("optimizer_states", "newton_schulz", "error_growth")

RMS_ERROR = "rms_error"
RELATIVE_ERROR = "relative_error"
SIGMA_MAX = "sigma_max"
COSINE_POLAR = "cosine_to_polar"
COSINE_FP32 = "cosine_to_fp32"
RMS_RATIO = "update_rms_ratio_to_fp32"
GUARD_HITS = "guard_hits"
BLOWN_UP = "blown_up"
MSE_V = "relative_mse_of_v"
UPDATE_ERROR = "next_update_error"
WORST_UPDATE_ERROR = "worst_next_update_error"
INFLATION = "largest_step_inflation"
BITS = "bits_per_element"
LARGEST_LOSS = "largest_later_train_loss"

UNITS = {
    RMS_ERROR: "1",
    RELATIVE_ERROR: "1",
    SIGMA_MAX: "1",
    COSINE_POLAR: "1",
    COSINE_FP32: "1",
    RMS_RATIO: "1",
    GUARD_HITS: "divisions",
    BLOWN_UP: "runs",
    MSE_V: "1",
    UPDATE_ERROR: "1",
    WORST_UPDATE_ERROR: "1",
    INFLATION: "1",
    BITS: "bits",
    VALIDATION_LOSS: "nats/byte",
    LARGEST_LOSS: "nats/byte",
}
MEANING = {
    RMS_ERROR: "root mean square of the error of a product's elements",
    RELATIVE_ERROR: "error over product, in the Frobenius norm",
    SIGMA_MAX: "largest singular value at the end; an orthogonal matrix has 1",
    COSINE_POLAR: "cosine of the result and the exact polar factor",
    COSINE_FP32: "cosine of the result and that of the same schedule in FP32",
    RMS_RATIO: "root mean square of the result over that in FP32: a hidden factor of the learning rate",
    GUARD_HITS: "iterates that were divided by their largest singular value",
    BLOWN_UP: "1 where the largest singular value ends above 10",
    MSE_V: "squared error of the stored second moment over its squares",
    UPDATE_ERROR: "error of the next AdamW update over the update",
    WORST_UPDATE_ERROR: "the same, of the worst matrix",
    INFLATION: "largest factor by which an element's next step grew",
    BITS: "stored bits an element",
    VALIDATION_LOSS: "validation loss of the tiny language model",
    LARGEST_LOSS: "its largest training loss after step 20, or half of a shorter run",
}
_TITLES = {
    "optimizer_states": "Optimizer states in 4 bits",
    "newton_schulz": "Newton-Schulz in NVFP4",
    "error_growth": "Error growth of NVFP4 products",
}


def of_experiment(rows: Sequence[Row]) -> str:
    """The one experiment that the rows are of; others are refused."""
    found = distinct(row.experiment for row in rows)
    if len(found) != 1 or found[0] not in EXPERIMENTS:
        raise Fp4ReproError(
            f"the table is of {', '.join(found)}, not of one of {', '.join(EXPERIMENTS)}: give what "
            "python -m fp4repro.fullstack wrote"
        )
    return found[0]


def by_setting(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows by setting and metric; those of a run's seeds together under its name."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        name, separator, last = row.setting.rpartition("/")
        setting = name if separator and last.startswith("seed-") else row.setting
        found.setdefault(setting, {}).setdefault(row.metric, []).append(row)
    return found


def optimizer_markdown(rows: Sequence[Row]) -> str:
    """One table, what its columns mean, and where it was measured."""
    experiment, of = of_experiment(rows), by_setting(rows)
    metrics = distinct(row.metric for row in rows)
    lines = [[name, *(_cell(found.get(metric, [])) for metric in metrics)] for name, found in of.items()]
    scale, device, torch, commit = origin(rows)
    notes = [
        f"- {name}: {row.note.removeprefix(NOT_RUN)}."
        for name, found in of.items()
        for row in found.get(VALIDATION_LOSS, [])
        if row.value is None
    ]
    parts = [
        f"# {_TITLES[experiment]}, scale `{scale}`",
        "\n".join(aligned(["setting", *metrics], lines)),
        "\n".join(f"- {metric}: {MEANING[metric]}." for metric in metrics),
        "\n".join(distinct(notes)),
        f"NVFP4 is emulated exactly. Measured on {device}; torch {torch}; commit {commit}.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _cell(rows: Sequence[Row]) -> str:
    values = [row.value for row in rows if row.value is not None]
    if not rows:
        return "-"
    if len(values) < len(rows):
        lost = [row for row in rows if row.value is None]
        return "not run" if lost[0].note.startswith(NOT_RUN) else f"{len(lost)} of {len(rows)} diverged"
    return f"{mean(values):.4g}" + (f" ({len(values)} seeds)" if len(values) > 1 else "")
