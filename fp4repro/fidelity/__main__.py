"""How close quantised arithmetic stays: `formats` on tensors, `gradients` on a model's products."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from fp4repro.config import load_scale
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.fidelity import gradients
from fp4repro.fidelity.formats import Study
from fp4repro.fidelity.samples import SAMPLES, SHAPE, sample
from fp4repro.fidelity.subject import HYBRID, Subject, of_pretrained, of_run
from fp4repro.fidelity.tensors import ACTIVATIONS, GRADIENTS, TOKENS, WEIGHTS, visit_tensors
from fp4repro.fidelity.variants import variants
from fp4repro.pretrained import Unavailable
from fp4repro.recipes import Recipe
from fp4repro.report.schema import Row, write_rows
from fp4repro.train import provenance

# The format study takes a pretrained model's linears from so many of its blocks.
FORMATS_BLOCKS = 6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.fidelity", description=__doc__)
    commands = parser.add_subparsers(required=True)
    formats = commands.add_parser("formats", help="the format study")
    formats.set_defaults(command=_formats)
    formats.add_argument("--model", action="append", default=[], help="a pretrained model beside the run")
    study = commands.add_parser("gradients", help="the gradient study")
    study.set_defaults(command=_gradients)
    study.add_argument("--model", help="a pretrained model, or 'hybrid' with --run: ours")
    study.add_argument("--text", type=Path, help="UTF-8 text in place of the corpus's held-out part")
    study.add_argument("--recipes", nargs="+", help="of the variants, all by default")
    study.add_argument("--whole", nargs="*", help="recipes for the whole model too, of the same")
    study.add_argument("--draws", type=int, help="of stochastic rounding")
    study.add_argument("--tokens", type=int, help="to run over")
    study.add_argument("--blocks", type=int, help="how many blocks, spread evenly; all by default")
    for command in (formats, study):
        command.add_argument("--scale", type=Path, help="scale file, configs/scales/*.yaml")
        command.add_argument("--run", type=Path, help="folder of a finished run of ours")
        command.add_argument("--data", type=Path, help="folder of token files that the run was trained on")
        command.add_argument(
            "--if-available",
            action="store_true",
            help="'not run' rows, not an error, for a model that cannot be had here",
        )
        command.add_argument("--out", type=Path, required=True, help="CSV to write")
    arguments = parser.parse_args()
    # Some hundred kernels, each for a second's work in all: compiling them would take minutes.
    os.environ.setdefault("FP4REPRO_COMPILE", "0")
    if bool(arguments.run) != bool(arguments.data):
        raise Fp4ReproError("--run and --data belong together: give both, or neither")
    if arguments.run and not arguments.scale:
        raise Fp4ReproError("a run is read with its scale: give --scale too")
    arguments.scale = load_scale(arguments.scale) if arguments.scale else None
    if arguments.scale:
        torch.set_num_threads(arguments.scale.threads)
    arguments.command(arguments)


def _gradients(arguments: argparse.Namespace) -> None:
    scale, plan = arguments.scale, arguments.scale.fidelity if arguments.scale else None
    known = variants()
    recipes = _named(known, arguments.recipes or (plan and plan.recipes) or list(known))
    whole = _named(known, arguments.whole if arguments.whole is not None else (plan.whole if plan else ()))
    draws = arguments.draws if arguments.draws is not None else (plan.draws if plan else 4)
    tokens = arguments.tokens if arguments.tokens is not None else (plan.tokens if plan else 512)
    columns = provenance.columns(scale.scale if scale else "", torch.device("cpu"))
    try:
        subject = _subject(arguments, tokens)
    except Unavailable as error:
        if not arguments.if_available:
            raise
        rows = gradients.not_run_rows(arguments.model, recipes, str(error), columns)
        write_rows(arguments.out, rows)
        return
    blocks = arguments.blocks or (plan.blocks if plan and subject.name != HYBRID else None)
    study = gradients.GradientStudy(subject, recipes, draws, blocks, _progress)
    rows = [*study.rows(columns), *gradients.whole_rows(subject, whole, 1, columns)]
    write_rows(arguments.out, rows)


def _progress(linears: list[str]) -> Iterator[str]:
    return tqdm(linears, desc="linears", file=sys.stderr, mininterval=10)


def _named(known: dict[str, Recipe], wanted: list[str]) -> dict[str, Recipe]:
    for name in wanted:
        if name not in known:
            raise Fp4ReproError(
                f"there is no recipe {name!r} in the gradient study; it has {', '.join(known)}"
            )
    return {name: known[name] for name in wanted}


def _subject(arguments: argparse.Namespace, tokens: int) -> Subject:
    model = arguments.model or (HYBRID if arguments.run else None)
    if model is None:
        raise Fp4ReproError("nothing to study: give --model NAME, or --run DIR --data DIR --scale FILE")
    if model != HYBRID:
        return of_pretrained(model, arguments.scale, tokens, arguments.text)
    if not arguments.run:
        raise Fp4ReproError(f"the model {HYBRID} is a run of ours: give --run DIR and --data DIR")
    return of_run(arguments.run, arguments.data, arguments.scale, tokens)


def _formats(arguments: argparse.Namespace) -> None:
    scale = arguments.scale
    device = provenance.choose_device(scale.device if scale else "cpu")
    columns = provenance.columns(scale.scale if scale else "", device)
    study = Study()
    for name in SAMPLES:
        study.describe(name, f"{SHAPE[0]} x {SHAPE[1]} values")
        study.add(name, sample(name, SHAPE).to(device))
    rows: list[Row] = []
    if arguments.run:
        _add(study, of_run(arguments.run, arguments.data, scale, TOKENS), device)
    for model in arguments.model:
        try:
            _add(study, of_pretrained(model, scale, TOKENS // 2), device, f"{model} ", FORMATS_BLOCKS)
        except Unavailable as error:
            if not arguments.if_available:
                raise
            rows += study.not_run(f"{model} {WEIGHTS}", str(error), columns)
    write_rows(arguments.out, [*study.rows(columns), *rows])


def _add(
    study: Study, subject: Subject, device: torch.device, prefix: str = "", blocks: int | None = None
) -> None:
    names = gradients.chosen_blocks(subject, blocks)
    count = f"{len(names)} of the {len(subject.blocks)} linears in the blocks of {subject.note}"
    for kind, what in ((WEIGHTS, "weights"), (ACTIVATIONS, "inputs"), (GRADIENTS, "output gradients")):
        study.describe(prefix + kind, f"{what} of {count}")
    subject.model.to(device)
    layers = {name: subject.linears[name] for name in names}
    visit_tensors(layers, subject.loss, lambda kind, _, x: study.add(prefix + kind, x))


if __name__ == "__main__":
    run_stage("fp4repro.fidelity", main)
