"""`python -m fp4repro.bench core`: this machine's figures beside the bounds of the core library."""

import argparse
import dataclasses
from pathlib import Path

import torch

from fp4repro.bench import core
from fp4repro.bench.workloads import Sizes
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.report.schema import write_rows
from fp4repro.train import provenance
from fp4repro.train.memory import keep_freed_memory

MULTIPLE = 128  # of the matrix's sides: FP8's blocks, the largest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("core", help="quantisers, linear and training step")
    command.add_argument("--size", type=int, default=Sizes.matrix, help="rows and columns of the matrix")
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--rounds", type=int, default=15, help="interleaved repetitions")
    command.add_argument("--out", type=Path, help="CSV to write")
    command.set_defaults(run=_core)
    arguments = parser.parse_args()
    arguments.run(arguments)


def _core(arguments: argparse.Namespace) -> None:
    size, threads, rounds = arguments.size, arguments.threads, arguments.rounds
    if size < MULTIPLE or size % MULTIPLE:
        raise Fp4ReproError(f"--size is {size}, but must be a multiple of {MULTIPLE}")
    if threads < 1 or rounds < 1:
        raise Fp4ReproError(f"--threads is {threads} and --rounds {rounds}, but both must be 1 or more")
    keep_freed_memory()
    torch.set_num_threads(threads)
    sizes = dataclasses.replace(Sizes(), matrix=size)
    conditions = core.conditions(sizes, threads, rounds)
    device = provenance.device_name(torch.device("cpu"))
    print(f"{device}; torch {torch.__version__}; {conditions}", flush=True)
    measured = core.measure(sizes, rounds)
    print(core.table(measured))
    if arguments.out:
        where = {"device": device, "torch": str(torch.__version__), "commit": provenance.commit()}
        write_rows(arguments.out, core.rows(measured, conditions, where))


if __name__ == "__main__":
    run_stage("fp4repro.bench", main)
