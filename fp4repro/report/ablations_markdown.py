"""The ablation table for a reader, and that of any experiment with entries: a pure function of both."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from fp4repro.ablations import Ablation
from fp4repro.report.ablations import FACTOR
from fp4repro.report.entries import CLAIM, MARGIN_METRIC, SPREAD, STEP_GAP
from fp4repro.report.gaps import RISE, WINDOW
from fp4repro.report.markdown import EMULATED, aligned
from fp4repro.report.plan import BRANCHES, SCRATCH
from fp4repro.report.power import seeds_needed, smallest_seen
from fp4repro.report.schema import DIVERGED, NOT_RUN, VALIDATION_LOSS, Row
from fp4repro.report.tables import GAP, origin

TITLES = {
    SCRATCH: "Runs from scratch: difference of the final validation losses",
    BRANCHES: "Branches from a BF16 run in its stable phase: mean difference of training losses, second half",
}
SIGN = (
    "A difference is 100 * (loss - other loss) / other loss over pairs of the same seed: positive means "
    "worse. [ ] are 95 % intervals of Student's t, variances pooled over the comparisons of a protocol."
)
RULES = (
    "Verdicts follow the rules of `fp4repro/report/verdict.py`: the smallest difference of "
    "interest, the margin, is a sixth of the whole recipe's own gap to BF16 under the same protocol. *worse* "
    "is supported where the interval lies above 0 and reaches the margin or beyond, not supported where it "
    "lies below the margin; *the same* is supported where the 90 % interval lies within ± the margin; the "
    "rest is undecided at this scale. A run diverged if a loss was "
    f"not finite or its training loss ended more than {RISE:g} nats above its lowest (means of {WINDOW} "
    "steps)."
)


def ablations_markdown(rows: Sequence[Row], ablations: Mapping[str, Ablation]) -> str:
    """A table of gaps and one of claims for each protocol, then what the spread says of seeds."""
    return entries_markdown("Ablations", rows, ablations, _factor)


def entries_markdown(
    title: str,
    rows: Sequence[Row],
    entries: Mapping[str, Ablation],
    beside: Callable[[str, Mapping], str],
    more: Mapping[str, str] | None = None,
    last: str = "",
) -> str:
    """Any experiment's: `more` are metrics in bytes with the heads of their columns, `beside` says what the
    rows of a protocol hold beside gaps, and `last` stands behind all protocols."""
    ours = [row for row in rows if row.provenance != "published"]
    of = {(row.setting, row.metric): row for row in ours}
    said = {(row.setting, row.metric): row for row in rows if row.provenance == "published"}
    scale, device, torch, commit = origin(ours)
    paragraphs = [f"# {title}, scale `{scale}`", SIGN]
    for protocol in (BRANCHES, SCRATCH):
        planned = [row.setting for row in ours if row.metric == DIVERGED]  # each entry has one, run or not
        names = [s.removeprefix(f"{protocol}/") for s in planned if s.startswith(f"{protocol}/")]
        if not names:
            continue
        gaps = _gaps(protocol, names, of, entries, more or {})
        paragraphs += [f"## {TITLES[protocol]}", "\n".join(gaps)]
        claims = list(_claims(protocol, names, of, said, entries))
        if claims:
            header = ["entry", "the paper says", "difference to", "measured, %", "verdict"]
            paragraphs += ["### Claims", "\n".join(aligned(header, claims))]
        paragraphs += ["\n".join(filter(None, [beside(protocol, of), *_power(protocol, ours, of)]))]
    notes = dict.fromkeys(
        f"- {row.setting}: {row.note}." for row in ours if row.metric == VALIDATION_LOSS and row.value is None
    )
    paragraphs += [last, RULES, "\n".join(notes)]
    paragraphs += [f"Scale {scale}; device {device}; torch {torch}; commit {commit}. {EMULATED}"]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _gaps(
    protocol: str,
    names: Sequence[str],
    of: Mapping,
    ablations: Mapping[str, Ablation],
    more: Mapping[str, str],
) -> Iterator[str]:
    header = ["group", "entry", "loss", "gap to baseline, %", "to its base, %", *more.values()]
    header.append("runs, diverged")
    if protocol == BRANCHES:
        header.insert(4, "over steps, %")
    lines, group = [], ""
    for name in names:
        setting, entry = f"{protocol}/{name}", ablations.get(name)
        of_group = entry.group if entry else "baseline"
        cells = [of_group if of_group != group else "", name, _loss(of.get((setting, VALIDATION_LOSS)))]
        group = of_group
        baseline, base = (entry.baseline, entry.base) if entry else (name, name)
        cells.append(value_cell(of.get((setting, GAP + baseline)), f" to {baseline}"))
        if protocol == BRANCHES:
            cells.append(value_cell(of.get((setting, STEP_GAP + baseline))))
        apart = base not in (name, baseline)
        cells.append(value_cell(of.get((setting, GAP + base)), f" to {base}") if apart else "")
        cells += [_megabytes(of.get((setting, metric))) for metric in more]
        diverged = of[setting, DIVERGED]
        cells.append("not run" if diverged.value is None else f"{diverged.n}, {diverged.value:.0f}")
        lines.append(cells)
    yield from aligned(header, lines)


def _claims(
    protocol: str, names: Sequence[str], of: Mapping, said: Mapping, ablations: Mapping[str, Ablation]
) -> Iterator[list[str]]:
    for name in names:
        for number, claim in enumerate(ablations[name].claims if name in ablations else (), 1):
            key = f"{protocol}/{name}", f"{CLAIM}{number}"
            row = of[key]
            verdict = "not run" if row.note.startswith(NOT_RUN) else row.note.partition(" at this scale")[0]
            yield [name, said[key].note, claim.than, value_cell(row), verdict]


def _factor(protocol: str, of: Mapping) -> str:
    rows = [row for (setting, metric), row in of.items() if metric == FACTOR and setting.startswith(protocol)]
    return "\n".join(
        f"Token factor of {row.setting.partition('/')[2]}: "
        + (
            row.note
            if row.value is None
            else f"{row.value:.2f}{_ends(row)} ({row.note}; published 1.36 at 8B)."
        )
        for row in rows
    )


def _power(protocol: str, ours: Sequence[Row], of: Mapping) -> Iterator[str]:
    """What the measured spread says of the number of seeds."""
    settings = {row.setting for row in ours if row.setting.startswith(f"{protocol}/")}
    seeds = max((row.n or 0 for row in ours if row.setting in settings), default=0)
    margin = of[f"{protocol}/all", MARGIN_METRIC]
    yield f"Smallest difference of interest: {margin.value:.3f} %, {margin.note}."
    for row in ours:
        if row.setting == f"{protocol}/all" and row.metric.startswith(SPREAD) and row.value and seeds > 1:
            groups = max(int(row.note.split(", ")[1].split()[0]) // (seeds - 1), 1)
            needed = seeds_needed(margin.value, row.value, groups)
            seen = smallest_seen(row.value, seeds, groups)
            yield (
                f"Standard deviation of a pair's difference to {row.metric.removeprefix(SPREAD)}: "
                f"{row.value:.3f} %. With {seeds} seeds a difference of {seen:.3f} % shows with 80 % power; "
                f"the margin needs {needed or 'too many'} seeds."
            )


def _loss(row: Row | None) -> str:
    return "" if row is None or row.value is None else f"{row.value:.4f}"


def _megabytes(row: Row | None) -> str:
    return "not run" if row is None or row.value is None else f"{row.value / 1e6:.3f}"


def value_cell(row: Row | None, to: str = "") -> str:
    """A gap with its interval, or what became of its runs."""
    if row is None:
        return ""
    if row.value is None:
        return "not run" if row.note.startswith(NOT_RUN) else "diverged"
    return f"{row.value:+.2f}{_ends(row, '+')}{to}"


def _ends(row: Row, sign: str = "") -> str:
    return "" if row.ci_low is None else f" [{row.ci_low:{sign}.2f}, {row.ci_high:{sign}.2f}]"
