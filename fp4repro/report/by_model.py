"""Rows of a study of models, whose settings are `<model>/<what>`, as figures by model."""

from collections.abc import Sequence

from fp4repro.errors import Fp4ReproError
from fp4repro.report.fidelity_metrics import split
from fp4repro.report.schema import Row

Figures = dict[tuple[str, str], Row]  # what (a recipe, a block, a choice of blocks) and metric


def by_model(rows: Sequence[Row], experiment: str, command: str) -> dict[str, Figures]:
    """Rows by model, then by what and metric; rows of another experiment are refused."""
    found: dict[str, Figures] = {}
    for row in rows:
        if row.experiment != experiment:
            raise Fp4ReproError(
                f"a row of {row.experiment}, {row.setting} is not one of the {experiment} study: give the "
                f"tables that python -m {command} wrote"
            )
        model, what = split(row.setting)
        found.setdefault(model, {})[what, row.metric] = row
    return found
