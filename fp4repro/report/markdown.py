"""The pretraining table for a reader: a pure function of its long rows."""

from collections.abc import Iterator, Sequence

from fp4repro.report.schema import (
    BITS_PER_BYTE,
    DIVERGED,
    NOT_RUN,
    PARAMETERS,
    TOKENS,
    VALIDATION_LOSS,
    VALIDATION_LOSS_BF16,
    Row,
)
from fp4repro.report.tables import BASELINES, GAP, ONE_SEED, origin

SIGN = (
    "A gap is 100 * (loss - baseline loss) / baseline loss over runs of the same seed: positive "
    "means worse than the baseline. ± and [ ] are 95 % intervals (Student's t over seeds)."
)
EMULATED = (
    "The losses were measured in training, validation with the forward pass of the recipe; 'forward in "
    "BF16' is the loss of the same weights in BF16, as the paper evaluates. FP8, NVFP4 and MXFP4 arithmetic "
    "is emulated: operands are rounded exactly to the format and multiplied in BF16 with FP32 accumulation. "
    "The losses tell of the format, the time that these runs took does not."
)


def pretrain_markdown(rows: Sequence[Row], seeds: int) -> str:
    """One wide table and its legend; `seeds` is the number planned for each recipe."""
    ours = [row for row in rows if row.provenance != "published"]
    others = [row for row in rows if row.provenance == "published"]
    of = {(row.setting, row.metric): row for row in ours}
    recipes = list(dict.fromkeys(row.setting for row in ours))
    gaps = [f"gap to {name.upper()} %" for name in BASELINES]
    header = [
        "recipe",
        "validation loss",
        "forward in BF16",
        "bits/byte",
        *gaps,
        "published gap %",
        "seeds",
        "provenance",
    ]
    lines = [
        [
            recipe,
            _loss(of[recipe, VALIDATION_LOSS]),
            _loss(of[recipe, VALIDATION_LOSS_BF16]),
            _loss(of[recipe, BITS_PER_BYTE]),
            *(_gap(of.get((recipe, GAP + name))) for name in BASELINES),
            _published(recipe, others),
            _seeds(of[recipe, VALIDATION_LOSS], of[recipe, DIVERGED], seeds),
            of[recipe, VALIDATION_LOSS].provenance,
        ]
        for recipe in recipes
    ]
    notes = dict.fromkeys(
        f"- {row.setting}: {row.note.removeprefix(NOT_RUN)}."
        for row in ours
        if row.note and (row.metric == VALIDATION_LOSS or row.value is None)
    )
    scale, device, torch, commit = origin(ours)
    paragraphs = [
        f"# Pretraining, scale `{scale}`",
        "\n".join(aligned(header, lines)),
        SIGN,
        "\n".join(notes),
        f"Scale {scale}: {_count(ours, TOKENS)} training tokens a run, {_count(ours, PARAMETERS)} "
        f"parameters; device {device}; torch {torch}; commit {commit}.",
        EMULATED,
        "\n".join(
            ["Published gaps, each in its own setting:", ""]
            + [
                f"{number}. {row.setting} to {_baseline(row)}, {row.note}."
                for number, row in enumerate(others, 1)
            ]
        )
        if others
        else "",
    ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns, so that the table reads well in a terminal too."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for cells in (header, ["-" * width for width in widths], *lines):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"| {' | '.join(padded)} |"


def _loss(row: Row) -> str:
    if row.value is None:
        return _why_empty(row)
    half = "" if row.ci_high is None else f" ± {row.ci_high - row.value:.4f}"
    return f"{row.value:.4f}{half}"


def _gap(row: Row | None) -> str:
    if row is None:
        return "baseline"
    if row.value is None:
        return _why_empty(row)
    ends = f"[{row.ci_low:+.2f}, {row.ci_high:+.2f}]" if row.n and row.n > 1 else f"({ONE_SEED})"
    return f"{row.value:+.2f} {ends}"


def _why_empty(row: Row) -> str:
    return "not run" if row.note.startswith(NOT_RUN) else "diverged"


def _published(recipe: str, others: Sequence[Row]) -> str:
    """Such as "to FP8 below 1 [1], above 1.5 [2]; to BF16 about 1.5 [3]"."""
    cells = {}
    for number, row in enumerate(others, 1):
        if row.setting == recipe:
            value = row.note.partition(":")[0].removesuffix(" %")
            cells.setdefault(_baseline(row), []).append(f"{value} [{number}]")
    return "; ".join(f"to {name} {', '.join(values)}" for name, values in cells.items()) or "none"


def _baseline(row: Row) -> str:
    return row.metric.removeprefix(GAP).upper()


def _seeds(loss: Row, diverged: Row, planned: int) -> str:
    used = f"{loss.n or 0} of {planned}"
    return f"{used}, {diverged.value:.0f} diverged" if diverged.value else used


def _count(rows: Sequence[Row], metric: str) -> str:
    values = sorted({row.value for row in rows if row.metric == metric and row.value})
    return " or ".join(f"{value:,.0f}" for value in values) or "an unknown number of"
