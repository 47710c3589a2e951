"""The sensitivity study for a reader: blocks, and choices of those to leave in BF16, as Markdown."""

from collections.abc import Iterator, Sequence

from fp4repro.report import sensitivity_metrics as names
from fp4repro.report.by_model import Figures, by_model
from fp4repro.report.fidelity_metrics import split
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import Row
from fp4repro.report.tables import origin

_BLOCK = "block-"
_COLUMNS = {
    "gradient error": names.ERROR,
    "spread over draws": names.NOISE,
    "loss increase": names.LOSS,
    "blocks in BF16": names.BLOCKS,
    "share of parameters": names.PARAMETERS,
}


def models_of(rows: Sequence[Row]) -> dict[str, Figures]:
    """Rows by model; those of another study are refused."""
    return by_model(rows, names.EXPERIMENT, "fp4repro.sensitivity")


def blocks_of(of: Figures) -> list[str]:
    return sorted({place for place, _ in of if place.startswith(_BLOCK)})


def sensitivity_markdown(rows: Sequence[Row]) -> str:
    """Choices and blocks, model by model."""
    scale, device, torch, commit = origin(rows)
    parts = [f"# Sensitivity of blocks, scale `{scale}`"]
    for model, of in models_of(rows).items():
        parts += _model(model, of)
    parts.append("\n".join(f"- {name}: {text}." for name, text in names.CHOICES.items()))
    parts.append(
        "Gradient error: all weight gradients of the blocks as one vector, the model under the recipe "
        "against the model in FP32, relative; loss increase in nats a token. Local errors are roots of "
        "mean squares over a block's linears, given exact operands. Draws are averaged; one text."
    )
    parts.append(f"Measured on {device}; torch {torch}; commit {commit}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _model(model: str, of: Figures) -> Iterator[str]:
    yield f"## {model}"
    none = of["none", names.ERROR]
    if none.value is None:
        yield none.note[:1].upper() + none.note[1:] + "."
        return
    yield f"{none.note}; {none.n} draws."
    places = [place for place in names.CHOICES if (place, names.ERROR) in of]
    lines = [
        [
            place,
            *(_cell(of.get((place, metric))) for metric in _COLUMNS.values()),
            of[place, names.ERROR].note.rpartition(": ")[2] if place != "none" else "none",
        ]
        for place in places
    ]
    yield "\n".join(aligned(["choice", *_COLUMNS, "which"], lines))
    best = min((of[p, names.ERROR] for p in places if p not in ("none", "least")), key=lambda row: row.value)
    paper = of["paper", names.ERROR]
    yield (
        f"Smallest gradient error: `{split(best.setting)[1]}`, {best.value:.4f}; the paper's choice has "
        f"{paper.value:.4f}, every block quantised {none.value:.4f}."
    )
    columns = {**{f"local {p}": m for p, m in names.LOCAL.items()}, "alone": names.ALONE_ERROR}
    columns["alone, loss"] = names.ALONE_LOSS
    lines = [
        [block.removeprefix(_BLOCK), *(_cell(of.get((block, m))) for m in columns.values())]
        for block in blocks_of(of)
    ]
    yield "\n".join(aligned(["block", *columns], lines))


def _cell(row: Row | None) -> str:
    if row is None or row.value is None:
        return "-"
    return f"{row.value:.0f}" if row.unit == "blocks" else f"{row.value:.4f}"
