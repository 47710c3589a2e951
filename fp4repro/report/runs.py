"""The runs of an experiment as planned: what each gave, or why it gave nothing.

The plan comes from the scale file, so that a run that is missing or diverged is seen and named
rather than left out.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp4repro.errors import Fp4ReproError
from fp4repro.report.schema import DIVERGED, NOT_RUN, Row, parse_rows, split_setting

METRICS = "metrics.csv"
CURVE = "curve.csv"


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows of runs by (recipe, seed) beside the plan that they are to fill."""

    experiment: str
    scale: str
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: dict[tuple[str, int], dict[str, Row]]  # by metric
    folders: dict[tuple[str, int], Path]

    def values(self, recipe: str, metric: str) -> dict[int, float]:
        """The metric by seed, of the runs that ended and did not diverge."""
        found = {}
        for seed in self.seeds:
            row = self.rows.get((recipe, seed), {}).get(metric)
            if row is not None and row.value is not None and not self._diverged(recipe, seed):
                found[seed] = row.value
        return found

    def diverged(self, recipe: str) -> int:
        """How many of the recipe's runs diverged."""
        return sum(self._diverged(recipe, seed) for seed in self.seeds)

    def ended(self, recipe: str) -> int:
        """How many of the recipe's runs ended, diverged or not."""
        return sum((recipe, seed) in self.rows for seed in self.seeds)

    def why_missing(self, recipe: str, metric: str) -> str:
        """Why seeds lack the metric, such as "seeds 0, 1 were not run"; empty where none does."""
        if recipe not in self.recipes:
            return f"{recipe} is not among the recipes of scale {self.scale}"
        have, seeds_of = self.values(recipe, metric), {}
        for seed in self.seeds:
            if seed not in have:
                seeds_of.setdefault(self._reason(recipe, seed, metric), []).append(str(seed))
        told = (
            f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)} {reason}"
            for reason, seeds in seeds_of.items()
        )
        return "; ".join(told)

    def _diverged(self, recipe: str, seed: int) -> bool:
        row = self.rows.get((recipe, seed), {}).get(DIVERGED)
        return row is not None and bool(row.value)

    def _reason(self, recipe: str, seed: int, metric: str) -> str:
        if (recipe, seed) not in self.rows:
            return "not run"
        rows = self.rows[recipe, seed]
        if self._diverged(recipe, seed):
            return rows[DIVERGED].note or "diverged"
        note = rows[metric].note if metric in rows else f"wrote no {metric}"
        return note.removeprefix(NOT_RUN)


def load_runs(
    experiment: str,
    scale: str,
    recipes: Sequence[str],
    seeds: Sequence[int],
    folders: Iterable[str | Path],
) -> Runs:
    """Read `metrics.csv` of each folder that has one.

    Raises Fp4ReproError for a folder whose run is not in the plan, is of another scale or
    experiment, or is given twice.
    """
    rows, places = {}, {}
    for folder in map(Path, folders):
        path = folder / METRICS
        if not path.exists():
            continue
        for row in parse_rows(path):
            if (row.experiment, row.scale) != (experiment, scale):
                raise Fp4ReproError(
                    f"{path} holds a run of {row.experiment} at scale {row.scale!r}, "
                    f"not of {experiment} at scale {scale!r}"
                )
            recipe, seed = run = split_setting(row.setting)
            if recipe not in recipes or seed not in seeds:
                raise Fp4ReproError(f"{path} holds {row.setting}, which scale {scale} does not plan")
            if places.setdefault(run, folder) != folder:
                raise Fp4ReproError(f"{row.setting} is in both {places[run]} and {folder}")
            rows.setdefault(run, {})[row.metric] = row
    return Runs(experiment, scale, tuple(recipes), tuple(seeds), rows, places)


def read_curve(folder: Path, x: str, y: str) -> tuple[list[float], list[float]]:
    """Two columns of a run's `curve.csv`, at the lines where `y` is filled in."""
    path = folder / CURVE
    if not path.exists():
        raise Fp4ReproError(f"{path} does not exist: run that training again")
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = {x, y} - set(reader.fieldnames or ())
        if missing:
            raise Fp4ReproError(f"{path} lacks the column {', '.join(sorted(missing))}")
        lines = [line for line in reader if line[y]]
    try:
        return [float(line[x]) for line in lines], [float(line[y]) for line in lines]
    except (TypeError, ValueError) as error:
        raise Fp4ReproError(f"{path} is damaged ({error}): run that training again") from None
