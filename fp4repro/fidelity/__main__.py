"""`python -m fp4repro.fidelity formats`: how close each number format stays, on synthetic and real data."""

import argparse
import os
from pathlib import Path

import torch

from fp4repro.config import Scale, load_scale
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.fidelity.formats import Study
from fp4repro.fidelity.samples import SAMPLES, SHAPE, sample
from fp4repro.fidelity.tensors import (
    ACTIVATIONS,
    GRADIENTS,
    WEIGHTS,
    held_out_sequences,
    linears,
    open_run,
    visit_tensors,
)
from fp4repro.report.schema import write_rows
from fp4repro.train import provenance


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.fidelity", description=__doc__)
    commands = parser.add_subparsers(required=True)
    formats = commands.add_parser("formats", help="the format study")
    formats.add_argument("--scale", type=Path, required=True, help="scale file, configs/scales/*.yaml")
    formats.add_argument("--run", type=Path, help="folder of a finished run, for real tensors")
    formats.add_argument("--data", type=Path, help="folder of token files that the run was trained on")
    formats.add_argument("--out", type=Path, required=True, help="CSV to write")
    formats.set_defaults(command=_formats)
    arguments = parser.parse_args()
    arguments.command(arguments)


def _formats(arguments: argparse.Namespace) -> None:
    if bool(arguments.run) != bool(arguments.data):
        raise Fp4ReproError("--run and --data belong together: give both, or neither for synthetic data only")
    # Some thirty kernels, each for a second's work in all: compiling them would take minutes.
    os.environ.setdefault("FP4REPRO_COMPILE", "0")
    scale = load_scale(arguments.scale)
    device = provenance.choose_device(scale.device)
    torch.set_num_threads(scale.threads)
    study = Study()
    for name in SAMPLES:
        study.describe(name, f"{SHAPE[0]} x {SHAPE[1]} values")
        study.add(name, sample(name, SHAPE).to(device))
    if arguments.run:
        _add_run(study, arguments.run, arguments.data, scale, device)
    where = {
        "scale": scale.scale,
        "device": provenance.device_name(device),
        "torch": str(torch.__version__),
        "commit": provenance.commit(),
    }
    write_rows(arguments.out, study.rows(where))


def _add_run(study: Study, run: Path, data_folder: Path, scale: Scale, device: torch.device) -> None:
    model, data, name = open_run(run, data_folder, scale)
    tokens, targets = held_out_sequences(data, scale)
    count = f"the {len(linears(model))} linears in the blocks of {name}"
    study.describe(WEIGHTS, count)
    for kind, what in ((ACTIVATIONS, "inputs"), (GRADIENTS, "output gradients")):
        study.describe(kind, f"{what} of {count}, {tokens.numel()} held-out tokens")
    visit_tensors(model.to(device), tokens, targets, study.add)


if __name__ == "__main__":
    run_stage("fp4repro.fidelity", main)
