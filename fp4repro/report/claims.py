"""What the papers claim, what was found at this scale, and whether it holds: one row a claim.

Rows are made from a folder's other tables alone, so `python -m fp4repro.verify` makes them anew. A row's
value, interval, `n`, scale and device are those of the measurement that speaks of the claim, its note is
`<verdict>; <claim>`. Verdicts:

published gap      "no larger than the published P": supported where our 95 % interval ends at or below P, not
                   supported where it begins above P, undecided otherwise and with one seed
entries            of the ablations and the full stack: by `report/verdict.py`, as their tables say
accuracy           "no worse after 4-bit training": not supported where the paired interval lies below 0, else
                   undecided, since no difference seen is not no difference
gradients          the rules of `report/fidelity.py`; one model and one text, so no interval
speed and memory   figures without a rule that was fixed beforehand: "no rule", or "not run"
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from fp4repro.report import fidelity
from fp4repro.report.entries import CLAIM
from fp4repro.report.evals import PAIRED
from fp4repro.report.markdown import aligned
from fp4repro.report.plan import ABLATIONS, FULLSTACK
from fp4repro.report.schema import Row
from fp4repro.report.tables import EXPERIMENT as PRETRAIN
from fp4repro.report.tables import GAP, origin

CLAIMS = "claims"
VERDICTS = ("supported", "not supported", "undecided", "no rule", "not run")
_WORDS = {"yes": "supported", "no difference": "undecided"}  # of the gradient study; the rest is "no"


def claim_rows(tables: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Every claim that these tables, by name, speak of."""
    return [row for name, read in READERS.items() if name in tables for row in read(tables[name])]


def verdict_of(row: Row) -> tuple[str, str]:
    """Verdict and claim of a row."""
    found, _, claim = row.note.partition("; ")
    return found, claim


def _claim(row: Row, setting: str, found: str, claim: str) -> Row:
    return replace(row, experiment=CLAIMS, setting=setting, note=f"{found}; {claim}")


def _gaps(rows: Sequence[Row]) -> Iterator[Row]:
    """The published gaps of the recipes that were trained, as upper bounds."""
    ours = {(r.setting, r.metric): r for r in rows if r.provenance != "published"}
    for number, said in enumerate((r for r in rows if r.provenance == "published"), 1):
        row = ours.get((said.setting, said.metric))
        if row is None:
            continue
        name, baseline = said.setting.upper(), said.metric.removeprefix(GAP).upper()
        claim = f"{name} costs no more beside {baseline} than published, {said.note}"
        yield _claim(row, f"{PRETRAIN}/{said.setting}/{number}", _within(row, said.value), claim)


def _within(row: Row, bound: float) -> str:
    if row.value is None:
        return "not run"
    if row.ci_high is None:
        return "undecided"
    return "supported" if row.ci_high <= bound else "not supported" if row.ci_low > bound else "undecided"


def _entries(rows: Sequence[Row]) -> Iterator[Row]:
    claims = [row for row in rows if re.fullmatch(rf"{CLAIM}\d+", row.metric)]
    said = {(r.setting, r.metric): r.note for r in claims if r.provenance == "published"}
    for row in claims:
        if row.provenance != "published":
            number = row.metric.removeprefix(CLAIM)
            found, _, asked = row.note.partition(" at this scale: ")
            found = found if found in VERDICTS else "not run"
            claim = said[row.setting, row.metric] + (f"; {asked}" if asked else "")
            yield _claim(row, f"{row.experiment}/{row.setting}/{number}", found, claim)


def _gradients(rows: Sequence[Row]) -> Iterator[Row]:
    for model, of in fidelity.models_of(rows).items():
        first = next(iter(of.values()))
        for number, (claim, figures, found) in enumerate(fidelity.claims(of), 1):
            value = float(re.search(r"-?\d+\.\d+", figures)[0])  # the first of its figures
            row = replace(first, metric="claim", value=value, unit="1", ci_low=None, ci_high=None, n=1)
            found = _WORDS.get(found, "not supported")
            yield _claim(row, f"fidelity/{model}/{number}", found, f"{claim} ({model}): {figures}")


def _accuracies(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if row.provenance == "measured" and row.metric.endswith(".acc.difference"):
            task = row.metric.removesuffix(".acc.difference")
            arm, _, other = row.setting.partition(" against ")
            worse = row.ci_high is not None and row.ci_high < 0
            found = "not run" if row.value is None else "not supported" if worse else "undecided"
            claim = f"accuracy on {task} of {arm} is no worse than of {other}, in points"
            yield _claim(row, f"{PAIRED}/{task}/{arm} against {other}", found, claim)


def _speed(rows: Sequence[Row]) -> Iterator[Row]:
    """Products measured here, beside the data sheet's ratio and the model's."""
    of = {(r.device, r.setting, r.metric): r for r in rows}
    for row in rows:
        level, _, base = row.metric.rpartition("_to_")
        if row.setting == "headline/measured here" and level == "kernel":
            claim = f"products in NVFP4 are faster than in {base.upper()}"
            peak = of.get((row.device, "headline/nvfp4", f"peak_ratio_to_{base}"))
            model = of.get((row.device, "headline/nemotron-12b", row.metric))
            claim += f", {peak.value:g} x by the data sheet" if peak and peak.value else ""
            claim += f", {model.value:.2g} x by our model" if model and model.value else ""
            found = "not run" if row.value is None else "no rule"
            yield _claim(row, f"roofline/{row.device}/{row.metric}", found, claim)


def _memory(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if row.metric == "nvfp4_share_one_orientation":
            what = row.setting.removeprefix("operand ")
            claim = f"operands in NVFP4 take about half of the memory that 8 bits take ({what})"
            yield _claim(row, f"memory/{what}", "not run" if row.value is None else "no rule", claim)


# Table -> its claims. A further study's claims are one more entry.
READERS: dict[str, Callable[[Sequence[Row]], Iterator[Row]]] = {
    PRETRAIN: _gaps,
    ABLATIONS: _entries,
    FULLSTACK: _entries,
    "fidelity": _gradients,
    PAIRED: _accuracies,
    "roofline": _speed,
    "memory": _memory,
}


def cells(row: Row) -> list[str]:
    """Claim, verdict, figure with its interval, seeds or questions, provenance, scale and device."""
    found, claim = verdict_of(row)
    figure = ""
    if row.value is not None:
        signed = f"{row.value:+.2f} {row.unit}" if row.unit in ("%", "points") else f"{row.value:.3g}"
        figure = signed + (f" [{row.ci_low:+.2f}, {row.ci_high:+.2f}]" if row.ci_low is not None else "")
    return [claim, found, figure, str(row.n or ""), row.provenance, row.scale, row.device]


HEADER = ["claim", "verdict", "found", "n", "provenance", "scale", "device"]


def claims_markdown(rows: Sequence[Row]) -> str:
    """The claims, a table for each of `READERS`, and what their words mean."""
    if not rows:
        return "# Claims\n\nNo table of this folder speaks of a claim.\n"
    _, _, torch, commit = origin(rows)
    parts = [
        "# Claims",
        f"{_counts(rows)}. The rules are in `fp4repro/report/claims.py`; verdicts hold at this scale only.",
    ]
    for name in READERS:
        some = [row for row in rows if row.setting.startswith(f"{name}/")]
        if some:
            table = "\n".join(aligned(HEADER, [cells(row) for row in some]))
            parts += [f"## From the table {name}", f"{_counts(some)}.", table]
    return "\n\n".join([*parts, f"torch {torch}; commit {commit}.\n"])


def _counts(rows: Sequence[Row]) -> str:
    return ", ".join(f"{count} {word}" for word, count in tally(rows).items())


def tally(rows: Sequence[Row]) -> dict[str, int]:
    """How many claims met each verdict."""
    found = [verdict_of(row)[0] for row in rows]
    return {word: found.count(word) for word in VERDICTS if word in found}
