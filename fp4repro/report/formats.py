"""The format study for a reader: what its metrics mean, and its Markdown.

A row's setting is `<format>/<data>`. All shares are of the values that are not zero, or of the blocks
that hold one; rows of several tensors pool their values for shares and take the mean over tensors of
the relative error, so that a large tensor does not hide a small one.
"""

from collections.abc import Iterable, Sequence

from fp4repro.errors import Fp4ReproError
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import Row
from fp4repro.report.tables import origin

EXPERIMENT = "formats"

SQNR = "sqnr_db"
RELATIVE_MSE = "relative_mse"
CLIPPED = "clipped_share"
FLUSHED = "flushed_to_zero_share"
ZERO_SCALES = "zero_scale_blocks_share"
NEAR_FP8 = "near_fp8_share"
NEAR_FP8_BLOCKS = "near_fp8_blocks_share"
NEAR_FP8_MAXIMA = "near_fp8_maxima_share"
BITS = "bits_per_value"
PADDED_BITS = "padded_bits_per_value"

UNITS = {
    SQNR: "dB",
    RELATIVE_MSE: "1",
    CLIPPED: "1",
    FLUSHED: "1",
    ZERO_SCALES: "1",
    NEAR_FP8: "1",
    NEAR_FP8_BLOCKS: "1",
    NEAR_FP8_MAXIMA: "1",
    BITS: "bits",
    PADDED_BITS: "bits",
}
MEANING = {
    SQNR: "signal to quantisation noise, -10 log10 of the relative MSE, dB",
    RELATIVE_MSE: "sum of squared errors over sum of squares",
    CLIPPED: "values above the element's maximum after scaling",
    FLUSHED: "values that become zero",
    ZERO_SCALES: "blocks whose scale is stored as zero, so that all of them is lost",
    NEAR_FP8: (
        "values whose relative error is at most 1/17, what E4M3 guarantees to a normal value: half a "
        "step of 1/8 above 1 + 1/16"
    ),
    NEAR_FP8_BLOCKS: (
        "blocks of whose values that are not zero at least a sixteenth (6.25 %, so one of 16) is near FP8, "
        "by the scale or by chance"
    ),
    NEAR_FP8_MAXIMA: (
        "blocks whose largest value is near FP8: the sixteenth that a format can promise, whatever the data"
    ),
    BITS: "codes, scales and amax as stored, over values",
    PADDED_BITS: "the same with the scales padded to the tensor core's tiles of 128 x 4",
}
# One table each: formats down, data across. The CSV holds the rest.
_BY_DATA = {
    SQNR: "SQNR, dB",
    FLUSHED: "Flushed to zero, % of values",
    CLIPPED: "Clipped, % of values",
    ZERO_SCALES: "Zero scales, % of blocks",
    NEAR_FP8_BLOCKS: "At least a sixteenth near FP8, % of blocks",
    NEAR_FP8_MAXIMA: "Largest value near FP8, % of blocks",
}
_BITS = {BITS: "as stored", PADDED_BITS: "scales padded to 128 x 4"}


def setting(format: str, data: str) -> str:
    return f"{format}/{data}"


def by_format_and_data(rows: Sequence[Row]) -> dict[tuple[str, str, str], Row]:
    """Rows by format, data and metric; rows of another experiment are refused."""
    found = {}
    for row in rows:
        format, separator, data = row.setting.partition("/")
        if row.experiment != EXPERIMENT or not separator:
            raise Fp4ReproError(
                f"a row of {row.experiment}, {row.setting} is not one of the format study: give the "
                "table that python -m fp4repro.fidelity formats wrote"
            )
        found[format, data, row.metric] = row
    return found


def distinct(values: Iterable[str]) -> list[str]:
    """In the order of their first appearance."""
    return list(dict.fromkeys(values))


def formats_markdown(rows: Sequence[Row]) -> str:
    """A table a metric, and what the metrics mean."""
    of = by_format_and_data(rows)
    formats, data = distinct(key[0] for key in of), distinct(key[1] for key in of)
    scale, device, torch, commit = origin(rows)
    parts = [f"# Number formats, scale `{scale}`"]
    for metric, title in _BY_DATA.items():
        lines = [[f, *(_cell(of.get((f, d, metric))) for d in data)] for f in formats]
        parts.append(_titled(title, data, lines))
    lines = [[f, *(_range([of.get((f, d, metric)) for d in data]) for metric in _BITS)] for f in formats]
    parts.append(_titled("Bits a value, smallest and largest over the data", _BITS.values(), lines))
    shares = "All shares are of the values that are not zero, or of the blocks that hold one."
    parts.append(shares)
    parts.append("\n".join(f"- {metric}: {text}." for metric, text in MEANING.items()))
    parts.append("Data:")
    parts.append("\n".join(f"- {name}: {note}." for name, note in _notes(of, data).items()))
    parts.append(f"Measured on {device}; torch {torch}; commit {commit}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _notes(of: dict[tuple[str, str, str], Row], data: Sequence[str]) -> dict[str, str]:
    """What is said of each kind of data, the same for every format."""
    said = {d: row.note for (_, d, metric), row in of.items() if metric == RELATIVE_MSE}
    return {d: said[d] for d in data if said.get(d)}


def _titled(title: str, columns: Iterable[str], lines: Sequence[Sequence[str]]) -> str:
    return f"**{title}**\n\n" + "\n".join(aligned(["format", *columns], lines))


def _cell(row: Row | None) -> str:
    """A share in per cent, decibels as they are; a dash where the metric does not apply."""
    if row is None or row.value is None:
        return "-"
    return f"{100 * row.value if row.unit == '1' else row.value:.2f}"


def _range(rows: Sequence[Row | None]) -> str:
    values = [row.value for row in rows if row is not None and row.value is not None]
    ends = distinct(f"{end:.3f}" for end in (min(values), max(values))) if values else ["-"]
    return " to ".join(ends)
