"""The gradient study for a reader: its tables and what it says of the paper's claims, as Markdown."""

from collections.abc import Iterator, Sequence

from fp4repro.report import fidelity_metrics as names
from fp4repro.report.by_model import Figures, by_model
from fp4repro.report.fidelity_metrics import metric
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import Row
from fp4repro.report.tables import origin

SLOTS = ("x_fprop", "w_fprop", "dy_dgrad", "w_dgrad", "dy_wgrad", "x_wgrad")
# Rules set before any figure was seen: errors closer than this are no difference.
SAME = 0.01  # of an error
SLOPE_WITHIN = 0.05  # of -1/2
NAMED = 4  # recipes of one line that are named
_ERRORS = {
    "fprop error": metric("fprop", names.ERROR),
    "dgrad error": metric("dgrad", names.ERROR),
    "dgrad bias": metric("dgrad", names.BIAS),
    "dgrad noise": metric("dgrad", names.NOISE),
    "chain-rule gap": metric("dgrad", names.CHAIN_RULE),
    "wgrad error": metric("wgrad", names.ERROR),
    "wgrad bias": metric("wgrad", names.BIAS),
    "wgrad noise": metric("wgrad", names.NOISE),
    "wgrad cosine": metric("wgrad", names.COSINE),
    "whole model's error": names.WHOLE_ERROR,
    "loss increase": names.LOSS_INCREASE,
}


def models_of(rows: Sequence[Row]) -> dict[str, Figures]:
    """Rows by model; those of another study are refused."""
    return by_model(rows, names.EXPERIMENT, "fp4repro.fidelity gradients")


def fidelity_markdown(rows: Sequence[Row]) -> str:
    """Tables and claims, model by model."""
    scale, device, torch, commit = origin(rows)
    parts = [f"# Gradient fidelity, scale `{scale}`"]
    for model, of in models_of(rows).items():
        parts += _model(model, of)
    parts.append("\n".join(f"- {name}: {text}." for name, text in names.MEANING.items()))
    parts.append(
        "Errors, biases and noises are roots of means of squares over linears, relative to the exact result. "
        "Local figures quantise every linear of the blocks, whatever the recipe's rule for BF16 blocks. No "
        "interval stands beside them: there is one model and one text, and draws are averaged."
    )
    parts.append(f"Measured on {device}; torch {torch}; commit {commit}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _model(model: str, of: Figures) -> Iterator[str]:
    recipes = list(dict.fromkeys(recipe for recipe, _ in of))
    first = next(iter(of.values()))
    yield f"## {model}"
    if all(row.value is None for row in of.values()):
        yield first.note[:1].upper() + first.note[1:] + "."
        return
    described = of.get((recipes[0], metric("wgrad", names.ERROR)))
    yield f"{described.note}; {described.n} draws." if described else ""
    shown = {title: m for title, m in _ERRORS.items() if any((r, m) in of for r in recipes)}
    lines = [[recipe, *(_cell(of.get((recipe, m))) for m in shown.values())] for recipe in recipes]
    yield "\n".join(aligned(["recipe", *shown], lines))
    yield from _draws(of, recipes)
    yield from _lost(of, recipes)
    lines = [list(line) for line in claims(of)]
    yield "**What theory says, and what is found**\n\n" + "\n".join(
        aligned(["claim", "measured", "found"], lines)
    )


def _draws(of: Figures, recipes: Sequence[str]) -> Iterator[str]:
    """Error of the mean of n draws by rounding dy alone; recipes that share it are one line."""
    for product in ("dgrad", "wgrad"):
        counts = rounding_draws(of, product)
        lines: dict[tuple[str, ...], list[str]] = {}
        for recipe in recipes:
            cells = [_cell(of.get((recipe, names.after_draws(product, names.ROUNDING, n)))) for n in counts]
            cells.append(_cell(of.get((recipe, metric(product, names.SLOPE))), 3))
            if set(cells) != {"-"}:
                lines.setdefault(tuple(cells), []).append(recipe)
        if lines and counts:
            title = f"**Mean error of n draws by the rounding of dy in {product}, and its slope**"
            table = [[_together(who), *cells] for cells, who in lines.items()]
            yield title + "\n\n" + "\n".join(aligned(["recipe", *map(str, counts), "slope"], table))


def rounding_draws(of: Figures, product: str) -> list[int]:
    """Numbers of draws whose mean error is known."""
    start, end = f"{product}_{names.ROUNDING}_", "_draws"
    found = {
        m.removeprefix(start).removesuffix(end) for _, m in of if m.startswith(start) and m.endswith(end)
    }
    return sorted(map(int, found))


def _together(recipes: Sequence[str]) -> str:
    """Recipes that share a line, the first of them by name."""
    rest = len(recipes) - NAMED
    return ", ".join(recipes[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _lost(of: Figures, recipes: Sequence[str]) -> Iterator[str]:
    """Shares in per cent by slot; recipes that lose the same are one line."""
    for what in names.SHARES:
        lines: dict[tuple[str, ...], list[str]] = {}
        for recipe in recipes:
            cells = [_cell(of.get((recipe, metric(slot, f"{what}_share"))), 2, 100) for slot in SLOTS]
            if set(cells) - {"-", "0.00"}:
                lines.setdefault(tuple(cells), []).append(recipe)
        if lines:
            table = [[_together(who), *cells] for cells, who in lines.items()]
            kind = {"kept": "values that are not zero", "blocks": "blocks"}[names.SHARES[what]]
            title = f"**{what.replace('_', ' ').capitalize()}, % of {kind}**"
            yield title + "\n\n" + "\n".join(aligned(["recipe", *SLOTS], table))


def claims(of: Figures) -> Iterator[tuple[str, str, str]]:
    """Claim, figures, and whether they agree with it, by the rules above."""

    def value(recipe: str, m: str) -> float | None:
        row = of.get((recipe, m))
        return row.value if row else None

    for product in ("dgrad", "wgrad"):
        with_sr, without = (value(r, metric(product, names.SLOPE)) for r in ("nvfp4", "no_sr"))
        if with_sr is not None and without is not None:
            holds = abs(with_sr + 0.5) <= SLOPE_WITHIN and abs(without) <= SLOPE_WITHIN
            yield (
                f"SR: dy's rounding error in {product} falls with draws as 1/sqrt(n), nearest's does not",
                f"slope {with_sr:.3f} with SR, {without:.3f} without",
                "yes" if holds else "no",
            )
    gaps = [value(r, metric("dgrad", names.CHAIN_RULE)) for r in ("nvfp4", "no_2d")]
    if None not in gaps:
        yield (
            "2D weights: dgrad multiplies what fprop did, 1x16 does not",
            f"gap {gaps[0]:.3f} with 2D, {gaps[1]:.3f} without",
            "yes" if gaps[0] == 0 < gaps[1] else "no",
        )
    for claim, m, better, worse in _ORDERS:
        a, b = value(better, m), value(worse, m)
        if a is not None and b is not None:
            found = "no difference" if abs(a - b) <= SAME * b else "yes" if a < b else "no, the opposite"
            yield claim, f"{a:.4f} {better}, {b:.4f} {worse}", found
    if ends := _ends(of):
        last, rest = ends
        found = "no difference" if abs(last - rest) <= SAME * rest else "yes" if last > rest else "no"
        yield (
            "the last layers show the largest wgrad error (nearest, 1x16, no RHT)",
            f"{last:.4f} last quarter of blocks, {rest:.4f} the others",
            found,
        )


_WGRAD, _DGRAD, _FPROP = (metric(product, names.ERROR) for product in ("wgrad", "dgrad", "fprop"))
_ORDERS = (
    ("RHT lowers the error of wgrad", _WGRAD, "nvfp4", "no_rht"),
    ("RHT lowers the error of wgrad with nearest rounding", _WGRAD, "no_sr", "only_2d"),
    ("random signs lower the error of wgrad", _WGRAD, "nvfp4", "signs_none"),
    ("a larger Hadamard transform (128) is better than 16", _WGRAD, "rht_128", "nvfp4"),
    ("16 is better than 4", _WGRAD, "nvfp4", "rht_4"),
    ("RHT lowers the error of dgrad", _DGRAD, "rht_dgrad", "nvfp4"),
    ("RHT lowers the error of fprop", _FPROP, "rht_fprop", "nvfp4"),
    ("nearest rounding errs less than SR in one draw", _WGRAD, "no_sr", "nvfp4"),
    ("SR of activations costs fprop more than nearest", _FPROP, "nvfp4", "sr_activations"),
    ("1x16 weights err less in fprop than 16x16", _FPROP, "no_2d", "nvfp4"),
    ("Four Over Six lowers the error of fprop", _FPROP, "four-over-six", "nvfp4"),
    ("NVFP4 errs less than MXFP4 in wgrad", _WGRAD, "nvfp4", "mxfp4"),
)


def _ends(of: Figures, recipe: str = "plain") -> tuple[float, float] | None:
    """Mean wgrad error of the last quarter of the blocks, and of the others."""
    start = f"{_WGRAD}@block-"
    errors = [row.value for (r, m), row in sorted(of.items()) if r == recipe and m.startswith(start)]
    count = len(errors) // 4
    if not count:
        return None
    return sum(errors[-count:]) / count, sum(errors[:-count]) / (len(errors) - count)


def _cell(row: Row | None, digits: int = 4, factor: float = 1) -> str:
    return "-" if row is None or row.value is None else f"{factor * row.value:.{digits}f}"
