"""Full-Stack FP4 taken apart: the gap of each module, alone and cumulative, beside memory.

Rows are those of `fp4repro.report.entries`, with two figures of memory a run. If modules did not act on
each other, the gap of all would be the sum of the gaps of each alone: both stand in the table, and their
difference with its interval, seed by seed. At 1B the paper has .61 % for the projections and .62 % for all
of it (arXiv 2607.04422); its two versions have two headlines, so that published rows name theirs.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fp4repro.ablations import Ablation, recipe_or_ablation
from fp4repro.config import Scale
from fp4repro.report.entries import EntryTable
from fp4repro.report.gaps import Outcomes
from fp4repro.report.plan import FULLSTACK, plans
from fp4repro.report.published import Published
from fp4repro.report.schema import ACTIVATION_BYTES, OPTIMIZER_BYTES, VALIDATION_LOSS, Row
from fp4repro.report.tables import GAP

BASE = "bf16"
SINGLES = ("projections", "attention", "optimizer")
ALL = "full_stack"
ORDERS = (("projections", "projections_attention", ALL), ("optimizer", "optimizer_attention", ALL))
PUBLISHED = "full-stack-"  # ids in configs/published.yaml begin so

MEMORY = {OPTIMIZER_BYTES: "optimizer states, MB", ACTIVATION_BYTES: "saved activations, MB"}
SUM_OF_SINGLES = "sum_of_single_gaps"
INTERACTION = "gap_beyond_sum_of_singles"


def fullstack_rows(
    scale: Scale, entries: Mapping[str, Ablation], published: Sequence[Published], root: Path
) -> list[Row]:
    """All rows of a scale, protocol by protocol, then the published gaps."""
    numbers = {figure.id: figure for figure in published}
    planned = plans(scale, dict(entries), FULLSTACK)
    tables = [FullstackTable(entries, numbers, Outcomes(plan, root)) for plan in planned]
    rows = [row for table in tables for row in table.rows()]
    return rows + [_published(f) for f in published if f.id.startswith(PUBLISHED) and f.unit == "%"]


class FullstackTable(EntryTable):
    experiment = FULLSTACK
    whole = ALL

    def rows(self) -> list[Row]:
        """With the baselines that are no entries first, whose memory the entries' is to be seen beside."""
        baselines = [name for name in self.plan.names if name not in self.plan.entries]
        return [row for name in baselines for row in self._baseline(name)] + super().rows()

    def _baseline(self, name: str) -> Iterator[Row]:
        yield self.mean(name, VALIDATION_LOSS)
        yield from self.of_run(name)
        yield self.diverged(name)

    def of_run(self, name: str) -> Iterator[Row]:
        for metric in MEMORY:
            yield self.mean(name, metric)

    def alike(self, name: str, other: str) -> Sequence[str]:
        """Those with the same kind of optimizer: what Muon changes comes on top of what a seed does."""
        kinds = {name: recipe_or_ablation(name, self.entries).optimizer.kind for name in self.plan.names}
        return [name for name, kind in kinds.items() if kind == kinds.get(other, "adamw")]

    def together(self) -> Iterator[Row]:
        """The sum of the singles' gaps, and what the gap of all has beyond it, both seed by seed."""
        if not {*SINGLES, ALL} <= set(self.plan.entries):
            return
        singles = [self.outcomes.gaps(name, BASE) for name in SINGLES]
        seeds = sorted(set.intersection(*(set(gaps) for gaps in singles)))
        sums = {seed: sum(gaps[seed] for gaps in singles) for seed in seeds}
        combined = self.outcomes.gaps(ALL, BASE)
        beyond = [combined[seed] - total for seed, total in sums.items() if seed in combined]
        missing = self.missing(BASE, *SINGLES, ALL)
        yield self.over_seeds(ALL, SUM_OF_SINGLES, list(sums.values()), missing)
        yield self.over_seeds(ALL, INTERACTION, beyond, missing)


def _published(figure: Published) -> Row:
    return Row(
        experiment=FULLSTACK,
        setting=figure.id,
        metric=GAP + BASE,
        value=figure.value,
        unit=figure.unit,
        provenance="published",
        note=f"{figure}: {figure.what}; {figure.setting}; {figure.source}",
    )
