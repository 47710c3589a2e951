"""The ablation table as long rows of the results schema: `fp4repro.report.entries`, and token factors."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fp4repro.ablations import Ablation, RunChange
from fp4repro.config import Scale
from fp4repro.errors import Fp4ReproError
from fp4repro.report.entries import EntryTable
from fp4repro.report.gaps import Outcomes
from fp4repro.report.plan import ABLATIONS, SCRATCH, plans
from fp4repro.report.published import Published
from fp4repro.report.schema import NOT_RUN, VALIDATION_LOSS, Row
from fp4repro.report.token_factor import token_factor

FACTOR = "token_factor"


def ablation_rows(
    scale: Scale, ablations: Mapping[str, Ablation], published: list[Published], root: Path
) -> list[Row]:
    """All rows of a scale, protocol by protocol, in the order of the plan."""
    numbers = {entry.id: entry for entry in published}
    tables = [AblationTable(ablations, numbers, Outcomes(p, root)) for p in plans(scale, dict(ablations))]
    return [row for table in tables for row in table.rows()]


class AblationTable(EntryTable):
    experiment = ABLATIONS
    whole = "nvfp4"

    def alike(self, name: str, other: str) -> Sequence[str]:
        """Those of the same model and length: another model's losses scatter otherwise."""
        runs = {n: self.entries[n].run if n in self.entries else RunChange() for n in self.plan.names}
        return [n for n, run in runs.items() if run == runs.get(name, RunChange())]

    def together(self) -> Iterator[Row]:
        """The token factor of every recipe that runs at more than one length."""
        if self.plan.protocol != SCRATCH:
            return
        bases = {self.entries[n].base for n in self.plan.entries if self.entries[n].run.tokens != 1}
        for base in sorted(bases - {"bf16"}):
            longer = [self.entries[n] for n in self.plan.entries if self.entries[n].base == base]
            lengths = {e.run.tokens: e.name for e in longer if e.baseline == "nvfp4"} | {1.0: base}
            if len(lengths) < 2:
                continue
            losses = {factor: self._losses(name) for factor, name in sorted(lengths.items())}
            try:
                got = token_factor(losses, self._losses("nvfp4"))
            except Fp4ReproError as error:
                yield self.row(base, FACTOR, None, note=NOT_RUN + str(error), unit="x tokens")
                continue
            note = f"tokens to reach the loss of nvfp4, from {', '.join(f'{f:g}' for f in losses)} x tokens"
            if not min(losses) <= got.mean <= max(losses):
                note += "; extrapolated"
            yield self.row(base, FACTOR, got.mean, (got.low, got.high), got.n, note, "x tokens")

    def _losses(self, name: str) -> dict[int, float]:
        runs = {seed: self.outcomes.runs.get((name, seed)) for seed in self.plan.seeds}
        return {s: v for s, run in runs.items() if run and (v := run.value(VALIDATION_LOSS)) is not None}
