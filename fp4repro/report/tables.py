"""The pretraining table as long rows of the results schema.

A gap is `100 * (loss - baseline loss) / baseline loss` of runs with the same seed: positive means
worse than the baseline. Runs that diverged or are missing are named in the notes and left out of
means; the seeds that remain are counted in `n`.
"""

from collections.abc import Sequence

from fp4repro.report.published import Published
from fp4repro.report.runs import Runs
from fp4repro.report.schema import (
    BITS_PER_BYTE,
    DIVERGED,
    NOT_RUN,
    PARAMETERS,
    TOKENS,
    UNITS,
    VALIDATION_LOSS,
    VALIDATION_LOSS_BF16,
    Row,
)
from fp4repro.report.stats import estimate, relative_gaps

EXPERIMENT = "pretrain"
BASELINES = ("bf16", "fp8")
GAP = "gap_to_"
ONE_SEED = "no interval: one seed"


def pretrain_rows(runs: Runs, published: Sequence[Published]) -> list[Row]:
    """Every recipe's figures, then the published gaps of the same recipes."""
    rows = []
    for recipe in runs.recipes:
        for metric in (VALIDATION_LOSS, VALIDATION_LOSS_BF16, BITS_PER_BYTE, TOKENS, PARAMETERS):
            missing = [runs.why_missing(recipe, metric)]
            rows.append(row_over_seeds(runs, recipe, metric, runs.values(recipe, metric), missing))
        for baseline in BASELINES:
            if baseline != recipe:
                gaps = gaps_by_seed(runs, recipe, baseline)
                missing = [runs.why_missing(name, VALIDATION_LOSS) for name in (recipe, baseline)]
                rows.append(row_over_seeds(runs, recipe, GAP + baseline, gaps, missing))
        rows.append(diverged_row(runs, recipe))
    rows += [
        Row(
            experiment=runs.experiment,
            setting=entry.compares[0],
            metric=GAP + entry.compares[1],
            value=entry.value,
            unit=entry.unit,
            provenance="published",
            note=f"{entry}: {entry.what}; {entry.setting}; {entry.source}",
        )
        for entry in published
        if entry.compares and entry.compares[0] in runs.recipes
    ]
    return rows


def gaps_by_seed(runs: Runs, recipe: str, baseline: str) -> dict[int, float]:
    """Gap in per cent of each seed that both recipes ended with."""
    ours, theirs = (runs.values(name, VALIDATION_LOSS) for name in (recipe, baseline))
    pairs = ours.keys() & theirs.keys()
    return relative_gaps({s: theirs[s] for s in pairs}, {s: ours[s] for s in pairs})


def row_over_seeds(
    runs: Runs,
    recipe: str,
    metric: str,
    values: dict[int, float],
    missing: Sequence[str],
    unit: str = "%",
) -> Row:
    """One figure over seeds; `missing` says which seeds it lacks and why, `unit` that of a metric which
    `schema.UNITS` does not have."""
    common = common_columns(runs, recipe) | {"metric": metric, "unit": UNITS.get(metric, unit)}
    notes = [note for note in missing if note]
    if not values:
        prefix = "" if runs.diverged(recipe) == len(runs.seeds) else NOT_RUN
        return Row(value=None, note=prefix + "; ".join(notes), **common)
    got = estimate(list(values.values()))
    if got.n == 1:
        notes.append(ONE_SEED)
    return Row(value=got.mean, ci_low=got.low, ci_high=got.high, n=got.n, note="; ".join(notes), **common)


def diverged_row(runs: Runs, recipe: str) -> Row:
    """How many of the recipe's runs diverged."""
    common = common_columns(runs, recipe) | {"metric": DIVERGED, "unit": UNITS[DIVERGED]}
    ended = runs.ended(recipe)
    if not ended:
        return Row(value=None, note=NOT_RUN + runs.why_missing(recipe, VALIDATION_LOSS), **common)
    return Row(value=runs.diverged(recipe), n=ended, **common)


def common_columns(runs: Runs, recipe: str) -> dict:
    """What the recipe's rows share; where its runs differ, each version is named."""
    found = [row for seed in runs.seeds for row in runs.rows.get((recipe, seed), {}).values()]
    return {
        "experiment": runs.experiment,
        "setting": recipe,
        "scale": runs.scale,
        **{field: versions(found, field) for field in ("device", "torch", "commit")},
    }


def versions(rows: Sequence[Row], field: str) -> str:
    """The values of a text field over rows, "a and b" where there are several."""
    return " and ".join(sorted({getattr(row, field) for row in rows} - {""}))


def origin(rows: Sequence[Row]) -> tuple[str, str, str, str]:
    """Scale, device, torch and commit of rows as a page names them; what no row tells is "unknown"."""
    scale, device, torch, commit = (
        versions(rows, field) or "unknown" for field in ("scale", "device", "torch", "commit")
    )
    return scale, device, torch, commit
