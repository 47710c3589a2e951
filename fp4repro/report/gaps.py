"""Differences between the runs of a plan, paired by seed, and which runs diverged.

From scratch, a pair's difference is that of the final validation losses. Branches leave the same weights
and see the same batches, so theirs is the mean over steps of the difference of training losses, taken
over the second half of the branch: the first shows the change of format itself. Both are in per cent of
the other run's loss, positive = worse.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fp4repro.errors import Fp4ReproError
from fp4repro.report.plan import BRANCHES, Plan
from fp4repro.report.runs import METRICS, read_curve
from fp4repro.report.schema import DIVERGED, VALIDATION_LOSS, Row, parse_rows

SECOND_HALF = 0.5  # share of a branch's steps that come before those compared
WINDOW = 16  # steps of a mean training loss
RISE = 0.5  # nats a token above its lowest: such a loss has diverged


@dataclass(frozen=True)
class Outcome:
    """One run: its rows by metric, its training losses by step, and why it counts as diverged."""

    rows: dict[str, Row]
    losses: np.ndarray
    diverged: str

    def value(self, metric: str) -> float | None:
        row = self.rows.get(metric)
        return None if row is None or self.diverged else row.value


@dataclass(frozen=True)
class Outcomes:
    """The runs of one plan as far as they were made."""

    plan: Plan
    root: Path  # results/<scale>

    @cached_property
    def runs(self) -> dict[tuple[str, int], Outcome]:
        keys = [(name, seed) for name in self.plan.names for seed in self.plan.seeds]
        folders = {key: self.root / self.plan.folder(*key) for key in keys}
        return {key: _read(path) for key, path in folders.items() if (path / METRICS).exists()}

    def ended(self, name: str) -> list[Outcome]:
        """The entry's runs that were made, diverged or not."""
        return [self.runs[name, seed] for seed in self.plan.seeds if (name, seed) in self.runs]

    def diverged(self, name: str) -> int:
        return sum(bool(run.diverged) for run in self.ended(name))

    def pairs(self, name: str, other: str) -> dict[int, tuple[Outcome, Outcome]]:
        """By seed, the runs of both that ended without diverging."""
        both = {s: (self.runs.get((name, s)), self.runs.get((other, s))) for s in self.plan.seeds}
        return {s: (a, b) for s, (a, b) in both.items() if a and b and not (a.diverged or b.diverged)}

    def validation_gaps(self, name: str, other: str, metric: str = VALIDATION_LOSS) -> dict[int, float]:
        """Difference of the final losses in per cent, by seed."""
        pairs = {s: (a.value(metric), b.value(metric)) for s, (a, b) in self.pairs(name, other).items()}
        return {s: 100 * (a - b) / b for s, (a, b) in pairs.items() if a is not None and b is not None}

    def step_gaps(self, name: str, other: str) -> dict[int, np.ndarray]:
        """Difference of the training losses in per cent of the other's mean, by seed: one a step compared."""
        found = {}
        for seed, (a, b) in self.pairs(name, other).items():
            if len(a.losses) != len(b.losses):
                raise Fp4ReproError(
                    f"branches {name} and {other} of seed {seed} have {len(a.losses)} and {len(b.losses)} "
                    "steps: run them again under one scale"
                )
            first = int(SECOND_HALF * len(a.losses))
            found[seed] = 100 * (a.losses - b.losses)[first:] / b.losses[first:].mean()
        return found

    def gaps(self, name: str, other: str) -> dict[int, float]:
        """The protocol's own difference in per cent, by seed."""
        if self.plan.protocol == BRANCHES:
            return {seed: float(steps.mean()) for seed, steps in self.step_gaps(name, other).items()}
        return self.validation_gaps(name, other)


def _read(folder: Path) -> Outcome:
    rows = {row.metric: row for row in parse_rows(folder / METRICS)}
    losses = np.array(read_curve(folder, "step", "train_loss")[1])
    diverged = rows[DIVERGED].note if rows[DIVERGED].value else rise(losses)
    return Outcome(rows, losses, diverged)


def rise(losses: np.ndarray) -> str:
    """Says so where the mean loss of `WINDOW` steps ends more than `RISE` above its own lowest."""
    if len(losses) < 2 * WINDOW:
        return ""
    means = np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid")
    up = means[-1] - means.min()
    return f"diverged: training loss ends {up:.2f} nats above its lowest" if up > RISE else ""
