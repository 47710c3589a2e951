"""`python -m fp4repro.bench core` (or `attention`): this machine's figures beside the project's bounds."""

import argparse
import dataclasses
from pathlib import Path
from types import ModuleType

import torch

from fp4repro.bench import attention, core
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.report.schema import write_rows
from fp4repro.train import provenance
from fp4repro.train.memory import keep_freed_memory

MULTIPLE = 128  # of the matrix's sides: FP8's blocks, the largest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("core", help="quantisers, linear and training step")
    command.add_argument("--size", type=int, default=core.Sizes.matrix, help="rows and columns of the matrix")
    command.set_defaults(run=_core)
    second = commands.add_parser("attention", help="fp4_attention against torch's in BF16")
    second.add_argument("--length", type=int, default=attention.Sizes.length, help="tokens")
    second.add_argument("--kv-heads", type=int, default=attention.Sizes.kv_heads, help="of 8 heads")
    second.set_defaults(run=_attention)
    for each in (command, second):
        each.add_argument("--threads", type=int, default=2)
        each.add_argument("--rounds", type=int, default=15, help="interleaved repetitions")
        each.add_argument("--out", type=Path, help="CSV to write")
    arguments = parser.parse_args()
    if arguments.threads < 1 or arguments.rounds < 1:
        raise Fp4ReproError(
            f"--threads is {arguments.threads} and --rounds {arguments.rounds}, but both must be 1 or more"
        )
    arguments.run(arguments)


def _core(arguments: argparse.Namespace) -> None:
    size = arguments.size
    if size < MULTIPLE or size % MULTIPLE:
        raise Fp4ReproError(f"--size is {size}, but must be a multiple of {MULTIPLE}")
    _report(core, dataclasses.replace(core.Sizes(), matrix=size), arguments)


def _attention(arguments: argparse.Namespace) -> None:
    sizes = attention.Sizes(length=arguments.length, kv_heads=arguments.kv_heads)
    if sizes.length < 1 or sizes.kv_heads < 1 or sizes.heads % sizes.kv_heads:
        raise Fp4ReproError(
            f"--length is {sizes.length} and --kv-heads {sizes.kv_heads}, but must be 1 or more, and divide "
            f"the {sizes.heads} heads"
        )
    _report(attention, sizes, arguments)


def _report(bench: ModuleType, sizes: object, arguments: argparse.Namespace) -> None:
    """Measure, print and write one benchmark."""
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    conditions = bench.conditions(sizes, arguments.threads, arguments.rounds)
    device = provenance.device_name(torch.device("cpu"))
    print(f"{device}; torch {torch.__version__}; {conditions}", flush=True)
    measured = bench.measure(sizes, arguments.rounds)
    print(core.table(measured))
    if arguments.out:
        where = {"device": device, "torch": str(torch.__version__), "commit": provenance.commit()}
        write_rows(arguments.out, core.rows(measured, conditions, where, bench.EXPERIMENT))


if __name__ == "__main__":
    run_stage("fp4repro.bench", main)
