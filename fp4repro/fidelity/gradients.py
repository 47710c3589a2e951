"""The gradient study: every recipe on every linear of a model, and on the model as a whole, as rows.

Over linears, squares of relative errors are averaged, so that each linear weighs the same however
large its gradient; shares pool the counts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity.local import Fidelity, Linear
from fp4repro.fidelity.subject import Subject
from fp4repro.fidelity.tensors import visit_tensors
from fp4repro.fidelity.whole import Whole
from fp4repro.recipes import PRODUCTS, SLOTS, Recipe
from fp4repro.report import fidelity_metrics as names
from fp4repro.report.schema import NOT_RUN, Row

Figures = Iterator[tuple[str, float | None, str]]  # metric, value, note


def chosen_blocks(subject: Subject, count: int | None) -> list[str]:
    """Linears of `count` blocks spread evenly from the first to the last; of all by default."""
    blocks = subject.blocks
    indices = sorted(set(blocks.values()))
    if count is not None and count < len(indices):
        steps = torch.linspace(0, len(indices) - 1, count).round().int().tolist()
        indices = [indices[i] for i in steps]
    return [name for name, block in blocks.items() if block in indices]


class GradientStudy:
    """Local fidelity of `recipes` on the linears of `blocks` blocks of a subject."""

    def __init__(
        self,
        subject: Subject,
        recipes: Mapping[str, Recipe],
        draws: int,
        blocks: int | None = None,
        progress: Callable[[Iterable], Iterable] = iter,
    ) -> None:
        if draws < 1 or (blocks is not None and blocks < 1):
            raise Fp4ReproError(
                f"{draws} draws, {blocks if blocks is not None else 'all'} blocks: each must be 1 or more"
            )
        self.subject, self.recipes, self.draws = subject, recipes, draws
        self.linears = chosen_blocks(subject, blocks)
        # By recipe and product: (name of the linear, its fidelity). By recipe and slot: counts.
        self.found: dict[tuple[str, str], list[tuple[str, Fidelity]]] = defaultdict(list)
        self.counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        captured: dict[str, dict] = defaultdict(dict)
        layers = {name: subject.linears[name] for name in self.linears}
        visit_tensors(layers, subject.loss, lambda kind, name, x: captured[name].update({kind: x}))
        for number, name in enumerate(progress(self.linears)):
            seen = captured.pop(name)
            self._add(name, Linear(seen["activations"], seen["gradients"], seen["weights"], number, draws))

    def _add(self, name: str, linear: Linear) -> None:
        for label, recipe in self.recipes.items():
            for product in PRODUCTS:
                if (fidelity := linear.fidelity(product, recipe)) is not None:
                    self.found[label, product].append((name, fidelity))
            for slot in SLOTS:
                self.counts[label, slot].update(linear.losses(slot, recipe))

    def rows(self, where: Mapping[str, str]) -> Iterator[Row]:
        """Results rows; `where` holds the columns that all share."""
        for label in self.recipes:
            for metric, value, note in self._figures(label):
                yield row(self.subject, label, metric, value, self.draws, note, where)

    def _figures(self, label: str) -> Figures:
        for product in PRODUCTS:
            found = self.found[label, product]
            if not found:
                yield names.metric(product, names.ERROR), None, f"{NOT_RUN}no linear has a shape for it"
                continue
            fidelities = [fidelity for _, fidelity in found]
            kept = len(found) < len(self.linears)
            note = f"{len(found)} of {len(self.linears)} linears have a shape for it" if kept else ""
            for measure, value in _pooled(fidelities):
                yield names.metric(product, measure), value, note
            yield from _curves(product, fidelities)
            yield from self._places(product, found)
        for slot in SLOTS:
            counts = self.counts[label, slot]
            for what, whole in names.SHARES.items():
                if counts[whole]:
                    yield names.metric(slot, f"{what}_share"), counts[what] / counts[whole], ""

    def _places(self, product: str, found: Sequence[tuple[str, Fidelity]]) -> Figures:
        places = defaultdict(list)
        for name, fidelity in found:
            places[names.block_place(self.subject.blocks[name])].append(fidelity.error)
        for name, fidelity in found:
            places[name.rpartition(".")[2]].append(fidelity.error)
        for place, squares in places.items():
            yield names.metric(product, names.ERROR, place), _root_mean(squares), ""


def _pooled(fidelities: Sequence[Fidelity]) -> Iterator[tuple[str, float]]:
    yield names.ERROR, _root_mean([f.error for f in fidelities])
    yield names.BIAS, _root_mean([f.bias for f in fidelities])
    yield names.NOISE, _root_mean([f.noise for f in fidelities])
    yield names.COSINE, sum(f.cosine for f in fidelities) / len(fidelities)
    if gaps := [f.chain_rule for f in fidelities if f.chain_rule is not None]:
        yield names.CHAIN_RULE, _root_mean(gaps)


def _curves(product: str, fidelities: Sequence[Fidelity]) -> Figures:
    for measure, curves in (
        (names.MEAN, [f.curve for f in fidelities]),
        (names.ROUNDING, [f.rounding for f in fidelities]),
    ):
        pooled = {n: _root_mean([curve[n] for curve in curves]) for n in curves[0]}
        for n, value in pooled.items():
            yield names.after_draws(product, measure, n), value, ""
        if measure == names.ROUNDING and len(pooled) > 1:
            yield names.metric(product, names.SLOPE), slope(pooled), ""


def slope(curve: Mapping[int, float]) -> float | None:
    """Mean slope of log error against log draws over a curve's steps; None for an error of zero."""
    steps = list(pairwise(sorted(curve.items())))
    if not steps or min(curve.values()) <= 0:
        return None
    return sum(math.log(b / a) / math.log(m / n) for (n, a), (m, b) in steps) / len(steps)


def _root_mean(squares: Sequence[float]) -> float:
    """Root of a mean of squares; an estimated one below zero is nothing."""
    return math.sqrt(max(sum(squares) / len(squares), 0.0))


def whole_rows(
    subject: Subject, recipes: Mapping[str, Recipe], draws: int, where: Mapping[str, str]
) -> Iterator[Row]:
    """End-to-end fidelity of the recipes, each under its own rule for BF16 blocks."""
    whole = Whole(subject)
    for label, recipe in recipes.items():
        n = draws if recipe.stochastic else 1
        found = whole.fidelity(recipe, n)
        note = f"{found.quantised} of {len(subject.blocks)} linears quantised"
        figures = {
            names.WHOLE_ERROR: math.sqrt(found.error),
            names.WHOLE_COSINE: found.cosine,
            names.LOSS_INCREASE: found.loss - whole.loss,
        }
        if n > 1:
            figures[names.WHOLE_BIAS] = math.sqrt(max(found.bias, 0.0))
            figures[names.WHOLE_NOISE] = math.sqrt(found.noise)
        for metric, value in figures.items():
            yield row(subject, label, metric, value, n, note, where)


def row(
    subject: Subject,
    label: str,
    metric: str,
    value: float | None,
    draws: int,
    note: str,
    where: Mapping[str, str],
) -> Row:
    """`n` counts draws here: there is one model and one text."""
    if value is not None and not math.isfinite(value):
        value, note = None, f"not finite under this recipe; {note}"
    elif value is None and not note:
        note = "no error at all, or a single draw"
    return Row(
        experiment=names.EXPERIMENT,
        setting=names.setting(subject.name, label),
        metric=metric,
        value=value,
        unit="nats/token" if metric == names.LOSS_INCREASE else "1",
        n=draws,
        note="; ".join(filter(None, (note, subject.note if metric in _DESCRIBED else ""))),
        **where,
    )


# The model and its text are named once for each recipe, not on every row.
_DESCRIBED = (names.metric("wgrad", names.ERROR), names.WHOLE_ERROR)


def not_run_rows(model: str, recipes: Iterable[str], reason: str, where: Mapping[str, str]) -> Iterator[Row]:
    """One row a recipe for a model that cannot be had."""
    for label in recipes:
        yield Row(
            experiment=names.EXPERIMENT,
            setting=names.setting(model, label),
            metric=names.metric("wgrad", names.ERROR),
            value=None,
            unit="1",
            note=NOT_RUN + reason,
            **where,
        )
