"""Is a pretraining table complete and finite? CI asks this of the smoke table."""

import os
from collections.abc import Iterator, Sequence

from fp4repro.errors import Fp4ReproError
from fp4repro.report.schema import BITS_PER_BYTE, DIVERGED, VALIDATION_LOSS, Row, parse_rows
from fp4repro.report.tables import BASELINES, GAP


def check_pretrain(path: str | os.PathLike, scale: str, recipes: Sequence[str], seeds: Sequence[int]) -> None:
    """Raise Fp4ReproError, a sentence for each fault; finiteness is the schema's."""
    rows = parse_rows(path)
    faults = list(_faults(rows, scale, recipes, len(seeds)))
    if faults:
        raise Fp4ReproError("\n".join(f"{path}: {fault}" for fault in faults))


def _faults(rows: Sequence[Row], scale: str, recipes: Sequence[str], seeds: int) -> Iterator[str]:
    of = {
        (row.setting, row.metric): row for row in rows if row.scale == scale and row.provenance == "measured"
    }
    for recipe in recipes:
        gaps = [GAP + name for name in BASELINES if name in recipes and name != recipe]
        for metric in (VALIDATION_LOSS, BITS_PER_BYTE, *gaps, DIVERGED):
            row = of.get((recipe, metric))
            if row is None:
                yield f"{recipe} has no measured {metric} at scale {scale}"
            elif row.value is None:
                yield f"{metric} of {recipe} is empty ({row.note})"
            elif row.n != seeds:
                yield f"{metric} of {recipe} stands on {row.n or 0} of {seeds} seeds ({row.note})"
            elif metric == DIVERGED:
                if row.value:
                    yield f"{row.value:.0f} of the {seeds} runs of {recipe} diverged"
            elif seeds > 1 and row.ci_low is None:
                yield f"{metric} of {recipe} lacks its interval"
            elif row.ci_low is not None and not row.ci_low <= row.value <= row.ci_high:
                yield f"{metric} of {recipe} lies outside its interval"
    if not any(row.provenance == "published" for row in rows):
        yield "no published gap stands beside ours"
