"""The study of LoRA-SVD for a reader: what its parts and metrics are, and its Markdown.

A row's setting is `<part>/<case>`. Errors are relative, in the Frobenius norm, to the product of the
unquantised operands.
"""

from collections.abc import Sequence

from fp4repro.errors import Fp4ReproError
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import Row
from fp4repro.report.tables import versions

EXPERIMENT = "projections"

ENERGY = "captured_energy"
OUTPUT, GRADIENT, WGRAD = "output_error", "input_gradient_error", "weight_gradient_error"
OUTPUT_RATIO, GRADIENT_RATIO = "output_error_to_rank_0", "input_gradient_error_to_rank_0"
LAW = "law_of_captured_energy"
FLOPS, RATE_SHARE = "side_path_flops", "side_path_time_at_a_quarter_rate"
TIME, REFRESH = "time_to_base_recipe", "refresh_to_step"
UNITS = dict.fromkeys(
    (ENERGY, OUTPUT, GRADIENT, WGRAD, OUTPUT_RATIO, GRADIENT_RATIO, LAW, FLOPS, RATE_SHARE, TIME, REFRESH),
    "1",
)
MEANING = {
    ENERGY: "share of the squared norm of W within the subspace, eta",
    OUTPUT_RATIO: "error of the output over that without a side path; likewise for the input gradient",
    LAW: "sqrt(1 - eta), which both ratios are to follow: errors of x and of R both scale with the norm of R",
    FLOPS: "multiplications of the side path over those of the 4-bit forward product, a count",
    RATE_SHARE: "the same where BF16 has a quarter of FP4's rate, a model",
    TIME: "forward and backward of the emulated linear over the base recipe's: says nothing of FP4 hardware",
    REFRESH: "one randomised SVD over one forward and backward of the base recipe, likewise",
}
RATIO_LAW, TRAINED, SKETCH, STALE, OPTIONS, COST = (
    "ratio-law",
    "trained",
    "sketch",
    "stale-basis",
    "options",
    "cost",
)
_PARTS = {
    RATIO_LAW: "Error and captured energy by rank, synthetic spectra",
    TRAINED: "The same on a trained model's weights and activations, mean over its linears",
    SKETCH: "Captured energy by power iterations and further columns",
    STALE: "After W has moved by a random matrix of a share of its norm",
    OPTIONS: "Options, one at a time",
    COST: "Cost",
}


def setting(part: str, *case: object) -> str:
    return "/".join([part, *map(str, case)])


def by_part(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Row]]]:
    """Rows by part, case and metric; rows of another experiment are refused."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        part, separator, case = row.setting.partition("/")
        if row.experiment != EXPERIMENT or not separator or part not in _PARTS:
            raise Fp4ReproError(
                f"a row of {row.experiment}, {row.setting} is not one of the study of projections: give "
                "the table that python -m fp4repro.fullstack projections wrote"
            )
        found.setdefault(part, {}).setdefault(case, {})[row.metric] = row
    return found


def projections_markdown(rows: Sequence[Row]) -> str:
    """A table a part, and what the metrics mean."""
    parts = [f"# LoRA-SVD projections, scale `{versions(rows, 'scale') or 'unknown'}`"]
    for part, cases in by_part(rows).items():
        metrics = list(dict.fromkeys(metric for case in cases.values() for metric in case))
        lines = [[case, *(_cell(of.get(metric)) for metric in metrics)] for case, of in cases.items()]
        parts.append(f"**{_PARTS[part]}**\n\n" + "\n".join(aligned(["case", *metrics], lines)))
        notes = dict.fromkeys(row.note for case in cases.values() for row in case.values() if row.note)
        parts.append("\n".join(f"- {note}." for note in notes))
    parts.append("\n".join(f"- {metric}: {text}." for metric, text in MEANING.items()))
    about = "; ".join(f"{name} {versions(rows, name) or 'unknown'}" for name in ("device", "torch", "commit"))
    parts.append(f"Measured but for what is called a count or a model; {about}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _cell(row: Row | None) -> str:
    if row is None or row.value is None:
        return "-"
    ends = "" if row.ci_low is None else f" [{row.ci_low:.3f}, {row.ci_high:.3f}]"
    return f"{row.value:.4f}{ends}"
