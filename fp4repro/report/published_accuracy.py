"""The accuracy table of arXiv 2509.25149 with the uncertainty that it was printed without.

The paper gives one accuracy an arm and benchmark. From the benchmark's number of questions follows what
two such figures can say: the unpaired interval needs nothing else, the paired one a share of discordant
questions, which only the authors could know; it is shown for stated shares, and marked modelled.
Composites are the means of their benchmarks, which `composite_faults` checks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fp4repro.config import BENCHMARKS, read_yaml
from fp4repro.errors import Fp4ReproError
from fp4repro.report.evals import PAIRED, TO_TELL, TOLD
from fp4repro.report.paired import paired_half_width, questions_needed, unpaired_half_width
from fp4repro.report.published import Published
from fp4repro.report.schema import Row

ARMS = ("nvfp4", "fp8")  # the arm, its baseline
DISCORDANCES = (0.05, 0.1, 0.2)
ROUNDING = 0.0101  # of a printed mean and its printed terms, per cent, and of a float
PAPER = "paper: nvfp4 against fp8"

Accuracies = dict[str, dict[str, Published]]  # benchmark or composite -> arm -> entry


def accuracies(published: Sequence[Published]) -> Accuracies:
    """The entries that are accuracies; raises Fp4ReproError where two claim the same place."""
    found: Accuracies = {}
    for entry in published:
        if entry.accuracy:
            name, arm = entry.accuracy
            other = found.setdefault(name, {}).setdefault(arm, entry)
            if other is not entry:
                raise Fp4ReproError(f"published figures {other.id} and {entry.id} are both {name}, {arm}")
    return found


def load_benchmarks(path: Path = BENCHMARKS) -> dict[str, dict]:
    return read_yaml(path)


def composites(benchmarks: Mapping[str, dict]) -> dict[str, list[str]]:
    """The benchmarks that each composite is the mean of."""
    parts: dict[str, list[str]] = {}
    for name, about in benchmarks.items():
        parts.setdefault(f"mean-{about['composite']}", []).append(name)
    return parts


def composite_faults(found: Accuracies, benchmarks: Mapping[str, dict]) -> Iterator[str]:
    """A sentence for each composite that is not the mean of its benchmarks."""
    for composite, parts in composites(benchmarks).items():
        for arm in ARMS:
            mean = sum(found[name][arm].value for name in parts) / len(parts)
            printed = found[composite][arm].value
            if abs(mean - printed) > ROUNDING:
                yield f"{composite}, {arm}: printed {printed}, the mean of {', '.join(parts)} is {mean:.4f}"


def published_rows(published: Sequence[Published], benchmarks: Mapping[str, dict]) -> list[Row]:
    """Both accuracies of each benchmark and composite, and their difference with its uncertainty."""
    rows, found = [], accuracies(published)
    parts = composites(benchmarks)
    for name, arms in found.items():
        for arm, entry in arms.items():
            rows.append(_row(name, arm, entry.value, "%", note=f"{entry.what}; {entry.source}"))
        rows.append(_difference(name, parts.get(name, [name]), found, benchmarks))
    questions = benchmarks["mmlu-pro"]["questions"]
    difference = _gap(found["mmlu-pro"])
    for share in DISCORDANCES:
        half = 100 * paired_half_width(difference / 100, share, questions)
        ends = {"ci_low": difference - half, "ci_high": difference + half}
        assumed = f"if {100 * share:g} % of the questions are discordant"
        suffix = f"discordant_{100 * share:g}"
        said = f"paired interval {assumed}"
        metric = f"difference.{suffix}"
        rows.append(_row("mmlu-pro", metric, difference, "points", "modelled", questions, said, **ends))
        said = f"at 5 %, with 80 % power, {assumed}"
        needed = questions_needed(TOLD, share)
        rows.append(_row("mmlu-pro", f"{TO_TELL}.{suffix}", needed, "questions", "modelled", note=said))
    return rows


def _gap(arms: Mapping[str, Published]) -> float:
    arm, baseline = (arms[name].value for name in ARMS)
    return round(arm - baseline, 6)  # of two decimals: what is beyond is the float's


def _difference(name: str, parts: Sequence[str], found: Accuracies, benchmarks: Mapping[str, dict]) -> Row:
    """A benchmark's, or of a composite, whose variance is that of a mean of independent parts."""
    difference = _gap(found[name])
    counts = [benchmarks[part].get("questions") for part in parts]
    if None in counts:
        note = "no interval: how many questions were asked is not known"
        return _row(name, "difference", difference, "points", note=note)
    halves = [
        unpaired_half_width(*(found[part][arm].value / 100 for arm in ARMS), count)
        for part, count in zip(parts, counts, strict=True)
    ]
    half = 100 * math.hypot(*halves) / len(parts)
    ends = {"ci_low": difference - half, "ci_high": difference + half}
    said = "unpaired interval, the least that bare figures allow"
    return _row(name, "difference", difference, "points", "modelled", sum(counts), said, **ends)


def _row(
    name: str,
    metric: str,
    value: float,
    unit: str,
    provenance: str = "published",
    n: int | None = None,
    note: str = "",
    **interval: float,
) -> Row:
    return Row(
        experiment=PAIRED,
        setting=PAPER,
        metric=f"{name}.{metric}",
        value=value,
        unit=unit,
        n=n,
        provenance=provenance,
        note=note,
        **interval,
    )
