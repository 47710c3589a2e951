"""Full-Stack FP4 taken apart: the gap of each module, alone and cumulative, beside memory.

Gaps are to the paired run without the stack, of the same seed. If modules did not act on each other, the
gap of all would be the sum of the gaps of each alone: both stand in the table, and their difference with
its interval, seed by seed. At 1B the paper has .61 % for the projections and .62 % for all of it
(arXiv 2607.04422); its two versions have two headlines, so that published rows name theirs.

The names below are entries of `configs/fullstack.yaml`; a run that writes no memory has "not run" there.
"""

from collections.abc import Sequence

from fp4repro.report.markdown import aligned
from fp4repro.report.published import Published
from fp4repro.report.runs import Runs
from fp4repro.report.schema import NOT_RUN, VALIDATION_LOSS, Row
from fp4repro.report.tables import GAP, ONE_SEED, diverged_row, gaps_by_seed, row_over_seeds

EXPERIMENT = "fullstack"
BASE, MUON_BASE = "bf16", "muon_base"
SINGLES = ("projections", "attention", "optimizer")
ALL = "all"
ORDERS = (("projections", "projections_attention", ALL), ("optimizer", "optimizer_attention", ALL))
PUBLISHED = "full-stack-"  # ids in configs/published.yaml begin so

OPTIMIZER_BYTES = "optimizer_state_bytes"
ACTIVATION_BYTES = "saved_activation_bytes"
MEMORY = {OPTIMIZER_BYTES: "optimizer states, MB", ACTIVATION_BYTES: "saved activations, MB"}
SUM_OF_SINGLES = "sum_of_single_gaps"
INTERACTION = "gap_beyond_sum_of_singles"


def baseline_of(entry: str) -> str:
    """The run that an entry's gap is against: Muon's own where it trains with Muon."""
    return MUON_BASE if entry.startswith("muon_") and entry != MUON_BASE else BASE


def fullstack_rows(runs: Runs, published: Sequence[Published]) -> list[Row]:
    """Figures of every entry, what the singles add up to, then the published gaps."""
    rows = []
    for entry in runs.recipes:
        rows.append(
            row_over_seeds(
                runs,
                entry,
                VALIDATION_LOSS,
                runs.values(entry, VALIDATION_LOSS),
                [runs.why_missing(entry, VALIDATION_LOSS)],
            )
        )
        if entry != BASE:
            baseline = baseline_of(entry)
            missing = [runs.why_missing(name, VALIDATION_LOSS) for name in (entry, baseline)]
            gaps = gaps_by_seed(runs, entry, baseline)
            rows.append(row_over_seeds(runs, entry, GAP + baseline, gaps, missing))
        for metric in MEMORY:
            values, why = runs.values(entry, metric), runs.why_missing(entry, metric)
            rows.append(row_over_seeds(runs, entry, metric, values, [why], "bytes"))
        rows.append(diverged_row(runs, entry))
    return [*rows, *_additivity(runs), *(_published(runs, entry) for entry in published if _is_ours(entry))]


def _additivity(runs: Runs) -> list[Row]:
    """The sum of the singles' gaps, and what the gap of all has beyond it, both seed by seed."""
    if ALL not in runs.recipes:
        return []
    singles = [gaps_by_seed(runs, name, BASE) for name in SINGLES]
    seeds = set.intersection(*(set(gaps) for gaps in singles))
    sums = {seed: sum(gaps[seed] for gaps in singles) for seed in sorted(seeds)}
    combined = gaps_by_seed(runs, ALL, BASE)
    beyond = {seed: combined[seed] - total for seed, total in sums.items() if seed in combined}
    missing = [runs.why_missing(name, VALIDATION_LOSS) for name in (BASE, *SINGLES)]
    also = [*missing, runs.why_missing(ALL, VALIDATION_LOSS)]
    return [
        row_over_seeds(runs, ALL, SUM_OF_SINGLES, sums, missing),
        row_over_seeds(runs, ALL, INTERACTION, beyond, also),
    ]


def _is_ours(entry: Published) -> bool:
    return entry.id.startswith(PUBLISHED) and entry.unit == "%"


def _published(runs: Runs, entry: Published) -> Row:
    return Row(
        experiment=runs.experiment,
        setting=entry.id,
        metric=GAP + BASE,
        value=entry.value,
        unit=entry.unit,
        provenance="published",
        note=f"{entry}: {entry.what}; {entry.setting}; {entry.source}",
    )


def fullstack_markdown(rows: Sequence[Row]) -> str:
    """One line an entry; the two cumulative orders; additivity; the published gaps by version."""
    ours = {(row.setting, row.metric): row for row in rows if row.provenance != "published"}
    entries = list(dict.fromkeys(setting for setting, _ in ours))
    header = ["entry", "validation loss", "gap %", "against", *MEMORY.values(), "seeds"]
    lines = []
    for entry in entries:
        loss = ours[entry, VALIDATION_LOSS]
        memory = [_number(ours[entry, metric], 1e-6, ".3f") for metric in MEMORY]
        gap, against = ours.get((entry, GAP + baseline_of(entry))), baseline_of(entry)
        gap = [_gap(gap), against] if gap else ["baseline", ""]
        lines.append([entry, _number(loss, 1, ".4f"), *gap, *memory, str(loss.n or 0)])
    parts = ["# Full-Stack FP4, module by module", "\n".join(aligned(header, lines))]
    for order in ORDERS:
        steps = [f"{name} {_gap(ours.get((name, GAP + BASE)))}" for name in order]
        parts.append("Cumulative: " + ", then ".join(steps) + ".")
    if (ALL, SUM_OF_SINGLES) in ours:
        parts.append(
            f"The gaps of {', '.join(SINGLES)} alone add up to {_gap(ours[ALL, SUM_OF_SINGLES])}; "
            f"all together have {_gap(ours[ALL, GAP + BASE])}, "
            f"which is {_gap(ours[ALL, INTERACTION])} beyond the sum."
        )
    told = [f"- {row.note}." for row in rows if row.provenance == "published"]
    parts.append("\n".join(["Published, each in its own setting:", "", *told]) if told else "")
    notes = {f"- {row.setting}, {row.metric}: {row.note}." for row in ours.values() if row.note}
    parts.append("\n".join(sorted(notes)))
    return "\n\n".join(filter(None, parts)) + "\n"


def _number(row: Row, factor: float, form: str) -> str:
    return "not run" if row.value is None else format(row.value * factor, form)


def _gap(row: Row | None) -> str:
    if row is None or row.value is None:
        return "not run" if row is None or row.note.startswith(NOT_RUN) else "diverged"
    ends = f"[{row.ci_low:+.2f}, {row.ci_high:+.2f}]" if row.ci_low is not None else f"({ONE_SEED})"
    return f"{row.value:+.2f} {ends}"
