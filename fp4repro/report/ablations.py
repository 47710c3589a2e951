"""The ablation table as long rows of the results schema.

Settings are `<protocol>/<entry>`. Gaps are `fp4repro.report.gaps`'s, with 95 % intervals of Student's t
whose spread is pooled over the comparisons of a protocol with the same other run; branches have a second
row with a moving-block bootstrap over steps, for these seeds. A claim is a row `claim_<n>` with the
difference that it speaks of and the verdict in its note; the publication's words are a published row
beside it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from fp4repro.ablations import Ablation, Claim
from fp4repro.config import Scale
from fp4repro.errors import Fp4ReproError
from fp4repro.report.gaps import Outcomes
from fp4repro.report.plan import BRANCHES, SCRATCH, Plan, depth, plans
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
from fp4repro.report.token_factor import token_factor
from fp4repro.report.verdict import Difference, margin_for, verdict

EXPERIMENT = "ablations"
STEP_GAP = "train_" + GAP  # with an interval over steps
CLAIM = "claim_"
SPREAD = "paired_sd_to_"
MARGIN_METRIC = "smallest_difference_of_interest"
FACTOR = "token_factor"
BLOCK = 8  # steps of a bootstrap block


def ablation_rows(
    scale: Scale, ablations: Mapping[str, Ablation], published: list[Published], root: Path
) -> list[Row]:
    """All rows of a scale, protocol by protocol, in the order of the plan."""
    numbers = {entry.id: entry for entry in published}
    rows = []
    for plan in plans(scale, dict(ablations)):
        table = _Table(scale, ablations, numbers, Outcomes(plan, root))
        rows += table.rows()
    return rows


class _Table:
    """The rows of one protocol."""

    def __init__(
        self,
        scale: Scale,
        ablations: Mapping[str, Ablation],
        numbers: Mapping[str, Published],
        outcomes: Outcomes,
    ) -> None:
        self.scale = scale
        self.ablations = ablations
        self.numbers = numbers
        self.outcomes = outcomes
        self.plan: Plan = outcomes.plan
        self.spreads: dict[str, Spread | None] = {}
        whole = self._whole_gap()
        self.margin = margin_for(whole)
        self.margin_note = (
            f"a sixth of the gap of nvfp4 to bf16, {whole:.2f} %"
            if whole and whole > 0
            else "a sixth of the published gap of 1.5 %"
        )

    def _whole_gap(self) -> float | None:
        """The whole recipe's mean gap to BF16 under this protocol."""
        gaps = list(self.outcomes.gaps("nvfp4", "bf16").values())
        return sum(gaps) / len(gaps) if gaps else None

    def rows(self) -> list[Row]:
        rows = [row for name in self.plan.entries for row in self._entry(self.ablations[name])]
        others = dict.fromkeys(self.ablations[name].baseline for name in self.plan.entries)
        others |= dict.fromkeys(self.ablations[name].base for name in self.plan.entries)
        rows += [row for other in others for row in self._spread_row(other)]
        rows.append(self._row("all", MARGIN_METRIC, self.margin, note=self.margin_note))
        return rows + list(self._factor())

    def _entry(self, entry: Ablation) -> Iterator[Row]:
        yield self._loss(entry, VALIDATION_LOSS)
        yield self._loss(entry, VALIDATION_LOSS_BF16)
        for other in dict.fromkeys((entry.baseline, entry.base)):
            if other != entry.name:
                yield self._gap(entry, other)
                if self.plan.protocol == BRANCHES:
                    yield self._bootstrap(entry, other)
        ended, metric = self.outcomes.ended(entry.name), DIVERGED
        if ended:
            yield self._row(entry.name, metric, self.outcomes.diverged(entry.name), n=len(ended))
        else:
            yield self._row(entry.name, metric, None, note=self._missing(entry.name))
        for number, claim in enumerate(entry.claims, 1):
            yield self._claim(entry, claim, number)
            yield self._said(entry, claim, number)

    def _loss(self, entry: Ablation, metric: str) -> Row:
        values = [v for run in self.outcomes.ended(entry.name) if (v := run.value(metric)) is not None]
        if not values:
            return self._row(entry.name, metric, None, note=self._missing(entry.name))
        got = estimate(values)
        return self._row(entry.name, metric, got.mean, (got.low, got.high), got.n)

    def _gap(self, entry: Ablation, other: str) -> Row:
        d = self.difference(entry.name, other)
        note = self._missing(entry.name, other) if d.n < len(self.plan.seeds) else ""
        alias = self.plan.alias.get(entry.name)
        if alias:
            same = f"the same run as {alias} in a model of {depth(self.scale)} blocks"
            note = "; ".join(filter(None, (note, same)))
        return self._row(entry.name, GAP + other, d.mean, d.interval(), d.n, note)

    def difference(self, name: str, other: str) -> Difference:
        gaps = list(self.outcomes.gaps(name, other).values())
        mean = sum(gaps) / len(gaps) if gaps else None
        runs = len(self.outcomes.ended(name))
        return Difference(mean, len(gaps), self._spread(other), self.outcomes.diverged(name), runs)

    def _spread(self, other: str) -> Spread | None:
        """Of the differences to one run, over all entries but those that are the same run as another."""
        if other not in self.spreads:
            names = [n for n in self.plan.names if n != other and n not in self.plan.alias]
            groups = [list(self.outcomes.gaps(name, other).values()) for name in names]
            self.spreads[other] = pooled(groups)
        return self.spreads[other]

    def _bootstrap(self, entry: Ablation, other: str) -> Row:
        series = list(self.outcomes.step_gaps(entry.name, other).values())
        metric = STEP_GAP + other
        if not series:
            return self._row(entry.name, metric, None, note=self._missing(entry.name, other))
        mean = sum(float(values.mean()) for values in series) / len(series)
        note = f"moving blocks of {BLOCK} steps over the second half of the branch, for these seeds"
        return self._row(entry.name, metric, mean, block_bootstrap(series, BLOCK), len(series), note)

    def _claim(self, entry: Ablation, claim: Claim, number: int) -> Row:
        d, metric = self.difference(entry.name, claim.than), f"{CLAIM}{number}"
        asked = f"expected {claim.expect} than {claim.than}".replace("same than", "the same as")
        asked = asked.replace("diverges than", "to diverge, beside")
        said = f"{verdict(claim.expect, d, self.margin)} at this scale: {asked}"
        if d.mean is None and not 2 * d.diverged > d.runs:
            return self._row(entry.name, metric, None, note=self._missing(entry.name, claim.than))
        if d.diverged:
            said += f"; {d.diverged} of {d.runs} runs diverged"
        if d.interval() is None:
            said += "; no spread: one seed"
        return self._row(entry.name, metric, d.mean, d.interval(), d.n, said)

    def _said(self, entry: Ablation, claim: Claim, number: int) -> Row:
        figure = self.numbers.get(claim.published) if claim.published else None
        if claim.published and figure is None:
            raise Fp4ReproError(f"{entry.name} names the published figure {claim.published!r}: there is none")
        note = f"{claim.says} ({claim.where})" + (f"; {figure}; {figure.source}" if figure else "")
        value, unit = (figure.value, figure.unit) if figure else (None, "%")
        row = self._row(entry.name, f"{CLAIM}{number}", value, note=note, unit=unit)
        return Row(**{**_fields(row), "provenance": "published", "device": "", "torch": "", "commit": ""})

    def _spread_row(self, other: str) -> Iterator[Row]:
        spread = self._spread(other)
        if spread:
            note = f"pooled over comparisons with {other}, {spread.df} degrees of freedom"
            yield self._row("all", SPREAD + other, spread.sd, note=note)

    def _factor(self) -> Iterator[Row]:
        """The token factor of every recipe that runs at more than one length."""
        if self.plan.protocol != SCRATCH:
            return
        bases = {self.ablations[n].base for n in self.plan.entries if self.ablations[n].run.tokens != 1}
        for base in sorted(bases - {"bf16"}):
            longer = [self.ablations[n] for n in self.plan.entries if self.ablations[n].base == base]
            lengths = {e.run.tokens: e.name for e in longer if e.baseline == "nvfp4"} | {1.0: base}
            if len(lengths) < 2:
                continue
            losses = {factor: self._losses(name) for factor, name in sorted(lengths.items())}
            try:
                got = token_factor(losses, self._losses("nvfp4"))
            except Fp4ReproError as error:
                yield self._row(base, FACTOR, None, note=NOT_RUN + str(error), unit="x tokens")
                continue
            note = f"tokens to reach the loss of nvfp4, from {', '.join(f'{f:g}' for f in losses)} x tokens"
            if not min(losses) <= got.mean <= max(losses):
                note += "; extrapolated"
            yield self._row(base, FACTOR, got.mean, (got.low, got.high), got.n, note, "x tokens")

    def _losses(self, name: str) -> dict[int, float]:
        runs = {seed: self.outcomes.runs.get((name, seed)) for seed in self.plan.seeds}
        return {s: v for s, run in runs.items() if run and (v := run.value(VALIDATION_LOSS)) is not None}

    def _missing(self, *names: str) -> str:
        """Why pairs of these are lacking."""
        reasons = []
        for name in names:
            if name not in self.plan.names:
                reasons.append(f"scale {self.scale.scale} does not plan {name}")
                continue
            lacking = [str(s) for s in self.plan.seeds if (name, s) not in self.outcomes.runs]
            if lacking:
                reasons.append(f"{name} of seed {', '.join(lacking)} was not run")
            reasons += sorted(
                {f"{name}: {run.diverged}" for run in self.outcomes.ended(name) if run.diverged}
            )
        ended = all(self.outcomes.ended(name) for name in names)
        return ("" if ended else NOT_RUN) + ("; ".join(reasons) or "no pair of runs ended")

    def _row(
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
            experiment=EXPERIMENT,
            setting=f"{self.plan.protocol}/{name}",
            metric=metric,
            value=value,
            unit=unit or UNITS.get(metric, "%"),
            ci_low=low,
            ci_high=high,
            n=n,
            scale=self.scale.scale,
            note=note if value is not None else note or NOT_RUN + "no run ended",
            **{field: versions(rows, field) for field in ("device", "torch", "commit")},
        )


def _fields(row: Row) -> dict:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}
