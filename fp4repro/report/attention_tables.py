"""The sensitivity of attention's products for a reader: metrics, Markdown, and earlier figures beside.

A row's setting is `<data>/<what is lowered>`. `PROTOTYPE` holds what a prototype measured on data drawn
the same way (mean of six seeds): ours must come near, and where they do not the table shows it.
"""

from collections.abc import Sequence

from fp4repro.errors import Fp4ReproError
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import Row
from fp4repro.report.tables import origin

EXPERIMENT = "attention_sensitivity"

ERROR_O, ERROR_DQ, ERROR_DK, ERROR_DV = "error_o", "error_dq", "error_dk", "error_dv"
ERRORS = {ERROR_O: "O", ERROR_DQ: "dQ", ERROR_DK: "dK", ERROR_DV: "dV"}
COMMON_K, COMMON_V = "common_share_k", "common_share_v"
DATA = "the tensors themselves"  # setting of the rows that describe data
CENTRED = ", V centred"  # ends the name of data whose common component of V is gone

# Of the training control (`fullstack.attention_control`).
CONTROL = "attention_control"
HIGH = "high precision"
LOSS, LOSS_GAP = "validation_loss", "validation_loss_gap"

PROTOTYPE = {
    ("gaussian", "QK^T, both times"): (0.111, 0.114, 0.115, 0.114),
    ("gaussian", "PV"): (0.125, 0.065, 0.061, 0.0),
    ("gaussian", "P^T dO"): (0.0, 0.0, 0.0, 0.134),
    ("gaussian", "dO V^T"): (0.0, 0.164, 0.161, 0.0),
    ("gaussian", "dS K"): (0.0, 0.128, 0.0, 0.0),
    ("gaussian", "dS^T Q"): (0.0, 0.0, 0.128, 0.0),
    ("gaussian", "full-stack, V in BF16"): (0.111, 0.171, 0.172, 0.114),
    ("gaussian", "full-stack"): (0.147, 0.198, 0.197, None),
    ("gaussian", "all seven"): (0.167, 0.249, 0.246, 0.179),
    ("gaussian", "control: P of the backward is another"): (None, 0.138, None, None),
    ("common V", "PV"): (None, 0.32, 0.29, None),
    ("common V", "dO V^T"): (None, 0.68, 0.62, None),
    ("common V", "full-stack, V in BF16"): (None, 0.174, 0.174, None),
    ("common V", "full-stack"): (None, 0.408, 0.403, None),
    ("common V", "full-stack, smooth V"): (None, 0.196, 0.196, None),
    ("common V", "full-stack + PV + dO V^T, smooth V"): (None, 0.253, 0.248, None),
    ("biased K", "full-stack, V in BF16"): (0.188, 0.375, None, None),
}
READING = (
    "Relative error (Frobenius norm) against float64 when only the named products take NVFP4 operands; the "
    "others take theirs as they came. `full-stack` is QK^T, dS K and dS^T Q lowered and Q, K and V stored as "
    "quantised views. In brackets: what the prototype of the method measured, where it did. Whether a "
    "product is sensitive is a matter of its data: compare a model's table with that of the same tensors "
    "without the common component of V."
)


def setting(data: str, lowered: str) -> str:
    return f"{data}/{lowered}"


def by_data(rows: Sequence[Row]) -> dict[str, dict[tuple[str, str], Row]]:
    """data -> (what is lowered, metric) -> row; rows of another experiment are refused."""
    found: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        data, separator, lowered = row.setting.rpartition("/")
        if row.experiment != EXPERIMENT or not separator:
            raise Fp4ReproError(
                f"a row of {row.experiment}, {row.setting} is not of the sensitivity of attention: give the "
                "table that python -m fp4repro.fullstack attention_sensitivity wrote"
            )
        found.setdefault(data, {})[lowered, row.metric] = row
    return found


def lowered_in(of: dict[tuple[str, str], Row]) -> list[str]:
    """What is lowered, in the order of the study."""
    return [name for name in dict.fromkeys(lowered for lowered, _ in of) if name != DATA]


def attention_markdown(rows: Sequence[Row]) -> str:
    """One table a kind of data."""
    scale, device, torch, commit = origin(rows)
    parts = [f"# Sensitivity of attention's products, scale `{scale}`", READING]
    for data, of in by_data(rows).items():
        lines = [
            [
                lowered,
                *(
                    _cell(of.get((lowered, metric)), PROTOTYPE.get((data, lowered), (None,) * 4)[place])
                    for place, metric in enumerate(ERRORS)
                ),
            ]
            for lowered in lowered_in(of)
        ]
        shares = ", ".join(
            f"{100 * of[DATA, metric].value:.1f} % of {name}"
            for metric, name in ((COMMON_K, "K"), (COMMON_V, "V"))
        )
        note = of[DATA, COMMON_V].note.partition("; ")[2]
        parts.append(f"**{data}** ({note}; the mean over keys makes up {shares}'s sum of squares)")
        parts.append("\n".join(aligned(["lowered", *ERRORS.values()], lines)))
    parts.append(f"Measured on {device}; torch {torch}; commit {commit}.")
    return "\n\n".join(parts) + "\n"


def _cell(row: Row | None, prototype: float | None) -> str:
    if row is None or row.value is None:
        return "-"
    value = f"{row.value:.3f}" if row.value >= 5e-4 else "0"
    return value if prototype is None else f"{value} ({prototype:.3f})"
