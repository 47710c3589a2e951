"""python -m fp4repro.sensitivity MODEL: which blocks to leave in BF16, by measured error."""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from fp4repro.config import Scale, load_scale
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.fidelity.subject import Subject, of_pretrained, of_run
from fp4repro.pretrained import Unavailable
from fp4repro.recipes import recipe
from fp4repro.report import sensitivity_metrics as names
from fp4repro.report.fidelity_metrics import block_place, setting
from fp4repro.report.schema import NOT_RUN, Row, write_rows
from fp4repro.report.sensitivity import sensitivity_markdown
from fp4repro.sensitivity.study import Sensitivity, errors_add_up
from fp4repro.train import provenance


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.sensitivity", description=__doc__)
    parser.add_argument("model", help="a pretrained model by name or folder, or the folder of a run of ours")
    parser.add_argument("--share", type=float, help="of blocks that choices leave in BF16; 0.16")
    parser.add_argument("--recipe", default="nvfp4", help="the recipe; its own rule for blocks is not used")
    parser.add_argument("--tokens", type=int, help="to run over; 512")
    parser.add_argument("--draws", type=int, default=2, help="of stochastic rounding for a choice")
    parser.add_argument("--text", type=Path, help="UTF-8 text in place of the corpus's held-out part")
    parser.add_argument("--scale", type=Path, help="scale file; a run of ours needs it")
    parser.add_argument("--data", type=Path, help="folder of token files that a run of ours was trained on")
    parser.add_argument(
        "--if-available",
        action="store_true",
        help="a 'not run' row, not an error, for a model that cannot be had here",
    )
    parser.add_argument("--out", type=Path, help="CSV to write")
    arguments = parser.parse_args()
    os.environ.setdefault("FP4REPRO_COMPILE", "0")  # few products of many shapes: as fidelity
    rows = list(_rows(arguments))
    if arguments.out:
        write_rows(arguments.out, rows)
    print(sensitivity_markdown(rows), end="")


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    scale = load_scale(arguments.scale) if arguments.scale else None
    if scale:
        torch.set_num_threads(scale.threads)
    plan = scale.fidelity if scale else None
    share = arguments.share if arguments.share is not None else (plan.share if plan else 0.16)
    if arguments.draws < 1:
        raise Fp4ReproError(f"--draws is {arguments.draws}; it must be 1 or more")
    if not 0 < share < 1:
        raise Fp4ReproError(f"--share is {share:g}; it must lie between 0 and 1")
    columns = provenance.columns(scale.scale if scale else "", torch.device("cpu"))
    columns["experiment"] = names.EXPERIMENT
    try:
        subject = _subject(
            arguments,
            scale,
            arguments.tokens if arguments.tokens is not None else (plan.tokens if plan else 512),
        )
    except Unavailable as error:
        if not arguments.if_available:
            raise
        yield from not_run(arguments.model, str(error), columns)
        return
    study = Sensitivity(subject, recipe(arguments.recipe), arguments.draws)
    study.run(share, lambda blocks: tqdm(blocks, desc="blocks", file=sys.stderr, mininterval=10))
    yield from rows_of(study, columns)


def _subject(arguments: argparse.Namespace, scale: Scale | None, tokens: int) -> Subject:
    folder = Path(arguments.model)
    if not (folder / "run.json").is_file():
        return of_pretrained(arguments.model, scale, tokens, arguments.text)
    if not (scale and arguments.data):
        raise Fp4ReproError(f"{folder} is a run of ours, read with --scale and --data: give both")
    return of_run(folder, arguments.data, scale, tokens)


def rows_of(study: Sensitivity, columns: Mapping[str, str]) -> Iterator[Row]:
    """Results rows of a finished study."""

    def row(place: str, metric: str, value: float, note: str = "") -> Row:
        unit, at = names.UNITS[metric], setting(study.subject.name, place)
        draws = study.draws if place in names.CHOICES else 1
        return Row(setting=at, metric=metric, value=value, unit=unit, n=draws, note=note, **columns)

    for block in study.blocks:
        place, alone = block_place(block), study.alone[block]
        for product, error in study.local[block].items():
            yield row(place, names.LOCAL[product], error)
        yield row(place, names.ALONE_ERROR, math.sqrt(alone.error))
        yield row(place, names.ALONE_LOSS, alone.loss - study.exact_loss)
    added = errors_add_up(study.alone, study.choices["none"].fidelity)
    for name, choice in study.choices.items():
        kept = " ".join(map(str, choice.blocks)) or "none"
        note = f"blocks in BF16: {kept}"
        if name == "none":
            note = f"{study.subject.note}; squared errors of blocks alone add up to {added:.2f} of this one's"
        yield row(name, names.ERROR, math.sqrt(choice.fidelity.error), note)
        yield row(name, names.NOISE, choice.fidelity.spread)
        yield row(name, names.LOSS, choice.fidelity.loss - study.exact_loss)
        yield row(name, names.BLOCKS, len(choice.blocks))
        yield row(name, names.PARAMETERS, choice.parameters)


def not_run(model: str, reason: str, columns: Mapping[str, str]) -> Iterator[Row]:
    """A row a choice for a model that cannot be had."""
    for name in names.CHOICES:
        at = setting(model, name)
        yield Row(setting=at, metric=names.ERROR, value=None, unit="1", note=NOT_RUN + reason, **columns)


if __name__ == "__main__":
    run_stage("fp4repro.sensitivity", main)
