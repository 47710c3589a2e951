"""The results schema: one long CSV for every experiment, one row a figure.

A run writes rows whose setting is `<recipe>/seed-<seed>` (`run_setting`). A table's rows, made from
several runs, have the recipe alone as their setting, `n` seeds and an interval. A figure that could
not be had is a row with an empty value and a note that says why (`not run: ...`, `diverged ...`):
nothing is dropped, and NaN is never written. Floats are written by `repr`, so they read back to the
same bits.
"""

import csv
import io
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd

from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write

PROVENANCES = ("measured", "modelled", "published")
NOT_RUN = "not run: "

# Metrics of a training run, with their units.
VALIDATION_LOSS = "validation_loss"  # forward in the recipe's own arithmetic
VALIDATION_LOSS_BF16 = "validation_loss_bf16"  # the same weights, forward in BF16
BITS_PER_BYTE = "bits_per_byte"
DIVERGED = "diverged"  # 0 or 1 for a run, the number of diverged seeds in a table
TOKENS = "tokens"  # seen in training
PARAMETERS = "parameters"
OPTIMIZER_BYTES = "optimizer_state_bytes"
ACTIVATION_BYTES = "saved_activation_bytes"  # that a forward pass of one micro-batch keeps for its backward
UNITS = {
    VALIDATION_LOSS: "nats/token",
    VALIDATION_LOSS_BF16: "nats/token",
    BITS_PER_BYTE: "bits/byte",
    DIVERGED: "runs",
    TOKENS: "tokens",
    PARAMETERS: "parameters",
    OPTIMIZER_BYTES: "bytes",
    ACTIVATION_BYTES: "bytes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure; the fields are the columns of the CSV, in this order."""

    experiment: str
    setting: str
    metric: str
    value: float | None
    unit: str
    ci_low: float | None = None
    ci_high: float | None = None
    n: int | None = None
    provenance: str = "measured"
    device: str = ""
    scale: str = ""
    torch: str = ""
    commit: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        where = f"results row {self.experiment}, {self.setting}, {self.metric}"
        if not (self.experiment and self.setting and self.metric):
            raise Fp4ReproError(f"{where}: experiment, setting and metric must not be empty")
        if self.provenance not in PROVENANCES:
            raise Fp4ReproError(
                f"{where}: provenance is {self.provenance!r}, not one of {', '.join(PROVENANCES)}"
            )
        for name in _FLOATS:
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise Fp4ReproError(f"{where}: {name} is {number}; leave it empty and say why in the note")
        if self.value is None and not self.note:
            raise Fp4ReproError(f"{where}: the value is empty and the note does not say why")
        if (self.ci_low is None) != (self.ci_high is None):
            raise Fp4ReproError(f"{where}: an interval needs both ends")


COLUMNS = tuple(field.name for field in fields(Row))
_FLOATS = ("value", "ci_low", "ci_high")


def run_setting(recipe: str, seed: int) -> str:
    """The setting of one run's rows."""
    return f"{recipe}/seed-{seed}"


def split_setting(setting: str) -> tuple[str, int]:
    """Recipe and seed of a run's setting."""
    recipe, separator, seed = setting.rpartition("/seed-")
    if not (recipe and separator and seed.isdigit()):
        raise Fp4ReproError(f"setting {setting!r} is not that of a run, which reads <recipe>/seed-<number>")
    return recipe, int(seed)


def _cell(name: str, value: str | float | None) -> str:
    if value is None:
        return ""
    return repr(float(value)) if name in _FLOATS else str(value)  # numpy's repr names its type


def write_rows(path: str | os.PathLike, rows: Iterable[Row]) -> None:
    """Write rows as CSV, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(_cell(name, value) for name, value in asdict(row).items())
    with atomic_write(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


def parse_rows(path: str | os.PathLike) -> list[Row]:
    """The rows of one CSV file; all but a whole file of this schema is refused with a sentence."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Fp4ReproError(f"{path} does not exist: run the stage that writes it first") from None
    except UnicodeDecodeError:
        raise Fp4ReproError(f"{path} is not a results file: it is not UTF-8 text") from None
    if not text.endswith("\n"):
        raise Fp4ReproError(
            f"{path} is truncated: its last line has no end; delete it and run its stage again"
        )
    header, *lines = csv.reader(io.StringIO(text))
    missing, extra = set(COLUMNS) - set(header), set(header) - set(COLUMNS)
    if missing or extra or len(header) != len(COLUMNS):
        faults = [
            f"{word} {', '.join(sorted(names))}"
            for word, names in (("is missing", missing), ("has the unknown", extra))
            if names
        ]
        raise Fp4ReproError(f"{path} {' and '.join(faults) or 'repeats a column'} in its header")
    if not lines:
        raise Fp4ReproError(f"{path} has a header and no rows; delete it and run its stage again")
    return [
        _parse(path, number, dict(zip(header, line, strict=False)), len(line))
        for number, line in enumerate(lines, 2)
    ]


def _parse(path: str | os.PathLike, number: int, cells: dict, width: int) -> Row:
    if width != len(COLUMNS):
        raise Fp4ReproError(f"{path}, line {number}: {width} cells where the schema has {len(COLUMNS)}")
    try:
        for name in _FLOATS:
            cells[name] = float(cells[name]) if cells[name] else None
        cells["n"] = int(cells["n"]) if cells["n"] else None
    except ValueError as error:
        raise Fp4ReproError(f"{path}, line {number}: {error}") from None
    try:
        return Row(**cells)
    except Fp4ReproError as error:
        raise Fp4ReproError(f"{path}, line {number}: {error}") from None


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a data frame; an empty number is NaN, an empty text is ''."""
    frame = pd.DataFrame([asdict(row) for row in rows], columns=COLUMNS)
    return frame.astype({**dict.fromkeys(_FLOATS, "float64"), "n": "Int64"})


def read_rows(paths: Iterable[str | os.PathLike]) -> pd.DataFrame:
    """All rows of several files, in their order; see `parse_rows` for what is refused."""
    return to_frame(row for path in paths for row in parse_rows(path))
