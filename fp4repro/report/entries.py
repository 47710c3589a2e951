"""Rows of the results schema for the entries of an experiment, one protocol at a time.

Settings are `<protocol>/<entry>`. Gaps are `fp4repro.report.gaps`'s, with 95 % intervals of Student's t
whose spread is pooled over the comparisons of a protocol with the same other run; branches have a second
row with a moving-block bootstrap over steps, for these seeds. A claim is a row `claim_<n>` with the
difference that it speaks of and the verdict in its note; the publication's words are a published row
beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from fp4repro.ablations import Ablation, Claim
from fp4repro.errors import Fp4ReproError
from fp4repro.report.gaps import Outcomes
from fp4repro.report.plan import BRANCHES, Plan, depth
from fp4repro.report.published import Published
from fp4repro.report.schema import (
    DIVERGED,
    NOT_RUN,
    UNITS,
    VALIDATION_LOSS,
    VALIDATION_LOSS_BF16,
    Row,
)
from fp4repro.report.stats import Spread, block_bootstrap, estimate, pooled
from fp4repro.report.tables import GAP, versions
from fp4repro.report.verdict import Difference, margin_for, verdict

STEP_GAP = "train_" + GAP  # with an interval over steps
CLAIM = "claim_"
SPREAD = "paired_sd_to_"
MARGIN_METRIC = "smallest_difference_of_interest"
BLOCK = 8  # steps of a bootstrap block


class EntryTable:
    """The rows of one protocol. Subclasses name the experiment and its whole recipe, a sixth of whose mean
    gap to BF16 is the margin, and may say more of each run and of all together."""

    experiment: str
    whole: str

    def __init__(
        self, entries: Mapping[str, Ablation], numbers: Mapping[str, Published], outcomes: Outcomes
    ) -> None:
        self.entries = entries
        self.numbers = numbers
        self.outcomes = outcomes
        self.plan: Plan = outcomes.plan
        self.spreads: dict[tuple[str, ...], Spread | None] = {}
        gaps = list(outcomes.gaps(self.whole, "bf16").values())
        whole = sum(gaps) / len(gaps) if gaps else None
        self.margin = margin_for(whole)
        self.margin_note = (
            f"a sixth of the gap of {self.whole} to bf16, {whole:.2f} %"
            if whole and whole > 0
            else "a sixth of the published gap of 1.5 %"
        )

    def rows(self) -> list[Row]:
        rows = [row for name in self.plan.entries for row in self._entry(self.entries[name])]
        others = dict.fromkeys(self.entries[name].baseline for name in self.plan.entries)
        others |= dict.fromkeys(self.entries[name].base for name in self.plan.entries)
        rows += [row for other in others for row in self._spread_row(other)]
        rows.append(self.row("all", MARGIN_METRIC, self.margin, note=self.margin_note))
        return [*rows, *self.together()]

    def of_run(self, name: str) -> Iterator[Row]:
        """What an experiment says of an entry's runs beside losses and gaps."""
        yield from ()

    def alike(self, name: str, other: str) -> Sequence[str]:
        """Runs whose differences to `other` scatter as those of `name` do."""
        return self.plan.names

    def together(self) -> Iterator[Row]:
        """What it says of several entries together."""
        yield from ()

    def _entry(self, entry: Ablation) -> Iterator[Row]:
        yield self.mean(entry.name, VALIDATION_LOSS)
        yield self.mean(entry.name, VALIDATION_LOSS_BF16)
        yield from self.of_run(entry.name)
        for other in dict.fromkeys((entry.baseline, entry.base)):
            if other != entry.name:
                yield self._gap(entry, other)
                if self.plan.protocol == BRANCHES:
                    yield self._bootstrap(entry, other)
        yield self.diverged(entry.name)
        for number, claim in enumerate(entry.claims, 1):
            yield self._claim(entry, claim, number)
            yield self._said(entry, claim, number)

    def mean(self, name: str, metric: str) -> Row:
        """A metric of the runs themselves, over seeds."""
        values = [v for run in self.outcomes.ended(name) if (v := run.value(metric)) is not None]
        silent = any(metric not in run.rows for run in self.outcomes.ended(name))
        missing = f"{NOT_RUN}{name} wrote no {metric}" if silent else self.missing(name)
        return self.over_seeds(name, metric, values, missing)

    def over_seeds(self, name: str, metric: str, values: Sequence[float], missing: str) -> Row:
        """Mean and interval of these; `missing` says why there are none."""
        if not values:
            return self.row(name, metric, None, note=missing)
        got = estimate(values)
        return self.row(name, metric, got.mean, (got.low, got.high), got.n)

    def diverged(self, name: str) -> Row:
        ended = self.outcomes.ended(name)
        if not ended:
            return self.row(name, DIVERGED, None, note=self.missing(name))
        return self.row(name, DIVERGED, self.outcomes.diverged(name), n=len(ended))

    def _gap(self, entry: Ablation, other: str) -> Row:
        d = self.difference(entry.name, other)
        note = self.missing(entry.name, other) if d.n < len(self.plan.seeds) else ""
        alias = self.plan.alias.get(entry.name)
        if alias:
            same = f"the same run as {alias} in a model of {depth(self.plan.scale)} blocks"
            note = "; ".join(filter(None, (note, same)))
        return self.row(entry.name, GAP + other, d.mean, d.interval(), d.n, note)

    def difference(self, name: str, other: str) -> Difference:
        gaps = list(self.outcomes.gaps(name, other).values())
        mean = sum(gaps) / len(gaps) if gaps else None
        runs = len(self.outcomes.ended(name))
        return Difference(mean, len(gaps), self._spread(name, other), self.outcomes.diverged(name), runs)

    def _spread(self, name: str, other: str) -> Spread | None:
        """Of the differences to `other`, over all alike but those that are the same run as another."""
        alike = [n for n in self.alike(name, other) if n != other and n not in self.plan.alias]
        key = (other, *alike)
        if key not in self.spreads:
            self.spreads[key] = pooled([list(self.outcomes.gaps(n, other).values()) for n in alike])
        return self.spreads[key]

    def _bootstrap(self, entry: Ablation, other: str) -> Row:
        series = list(self.outcomes.step_gaps(entry.name, other).values())
        metric = STEP_GAP + other
        if not series:
            return self.row(entry.name, metric, None, note=self.missing(entry.name, other))
        mean = sum(float(values.mean()) for values in series) / len(series)
        note = f"moving blocks of {BLOCK} steps over the second half of the branch, for these seeds"
        return self.row(entry.name, metric, mean, block_bootstrap(series, BLOCK), len(series), note)

    def _claim(self, entry: Ablation, claim: Claim, number: int) -> Row:
        d, metric = self.difference(entry.name, claim.than), f"{CLAIM}{number}"
        asked = f"expected {claim.expect} than {claim.than}".replace("same than", "the same as")
        asked = asked.replace("diverges than", "to diverge, beside")
        said = f"{verdict(claim.expect, d, self.margin)} at this scale: {asked}"
        if d.mean is None and not 2 * d.diverged > d.runs:
            return self.row(entry.name, metric, None, note=self.missing(entry.name, claim.than))
        if d.diverged:
            said += f"; {d.diverged} of {d.runs} runs diverged"
        if d.interval() is None:
            said += "; no spread: one seed"
        return self.row(entry.name, metric, d.mean, d.interval(), d.n, said)

    def _said(self, entry: Ablation, claim: Claim, number: int) -> Row:
        figure = self.numbers.get(claim.published) if claim.published else None
        if claim.published and figure is None:
            raise Fp4ReproError(f"{entry.name} names the published figure {claim.published!r}: there is none")
        note = f"{claim.says} ({claim.where})" + (f"; {figure}; {figure.source}" if figure else "")
        value, unit = (figure.value, figure.unit) if figure else (None, "%")
        row = self.row(entry.name, f"{CLAIM}{number}", value, note=note, unit=unit)
        return Row(**{**asdict(row), "provenance": "published", "device": "", "torch": "", "commit": ""})

    def _spread_row(self, other: str) -> Iterator[Row]:
        spread = self._spread(other, other)
        if spread:
            note = f"pooled over comparisons with {other}, {spread.df} degrees of freedom"
            yield self.row("all", SPREAD + other, spread.sd, note=note)

    def missing(self, *names: str) -> str:
        """Why pairs of these are lacking."""
        reasons = []
        for name in names:
            if name not in self.plan.names:
                reasons.append(f"scale {self.plan.scale.scale} does not plan {name}")
                continue
            lacking = [str(s) for s in self.plan.seeds if (name, s) not in self.outcomes.runs]
            if lacking:
                reasons.append(f"{name} of seed {', '.join(lacking)} was not run")
            reasons += sorted(
                {f"{name}: {run.diverged}" for run in self.outcomes.ended(name) if run.diverged}
            )
        ended = all(self.outcomes.ended(name) for name in names)
        return ("" if ended else NOT_RUN) + ("; ".join(reasons) or "no pair of runs ended")

    def row(
        self,
        name: str,
        metric: str,
        value: float | None,
        ends: tuple[float | None, float | None] | None = None,
        n: int | None = None,
        note: str = "",
        unit: str = "",
    ) -> Row:
        rows = [row for run in self.outcomes.ended(name) for row in run.rows.values()]
        low, high = ends or (None, None)
        return Row(
            experiment=self.experiment,
            setting=f"{self.plan.protocol}/{name}",
            metric=metric,
            value=value,
            unit=unit or UNITS.get(metric, "%"),
            ci_low=low,
            ci_high=high,
            n=n,
            scale=self.plan.scale.scale,
            note=note if value is not None else note or NOT_RUN + "no run ended",
            **{field: versions(rows, field) for field in ("device", "torch", "commit")},
        )
