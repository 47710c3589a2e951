"""`python -m fp4repro.bench core` (`attention`, `optimizer`): this machine's figures beside the bounds.

`gemm`: the products of a model's linears in BF16, FP8 and NVFP4, on a GPU where there is one, else
emulated. `casts`: how fast operands are quantised, beside a copy. `scan`: the selective scan beside
transformers' fallback. `ranks`: what a second rank is worth.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from fp4repro.bench import attention, casts, core, cuda, gemm, gemm_rows, optimizer, ranks, scan
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.report.schema import Row, write_rows
from fp4repro.roofline.calibrate import model_config
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
    third = commands.add_parser("scan", help="the selective scan against transformers' fallback")
    third.add_argument("--length", type=int, default=scan.Sizes.context, help="tokens of a sequence")
    third.set_defaults(run=_scan)
    fourth = commands.add_parser("optimizer", help="AdamW with 4-bit states against torch's fused one")
    fourth.add_argument("--size", type=int, default=optimizer.Sizes.matrix, help="rows and columns")
    fourth.set_defaults(run=_optimizer)
    for each in (command, second, third, fourth):
        each.add_argument("--threads", type=int, default=2)
        each.add_argument("--rounds", type=int, default=15, help="interleaved repetitions")
        each.add_argument("--out", type=Path, help="CSV to write")
    command = commands.add_parser("gemm", help="products of a model's linears in every format")
    command.add_argument("--model", required=True, help="a file of configs/models, by its name")
    command.add_argument("--tokens", type=int, help="of a microbatch (default 8192, on a CPU 256)")
    _add_device(command, _gemm)
    command = commands.add_parser("casts", help="quantisation of operands beside a copy")
    command.add_argument("--size", type=int, help="rows and columns (default 8192, on a CPU 1024)")
    _add_device(command, _casts)
    command = commands.add_parser("ranks", help="training steps of two ranks against one")
    command.add_argument("--rounds", type=int, default=15, help="interleaved repetitions")
    command.add_argument("--out", type=Path, help="CSV to write")
    command.set_defaults(run=_ranks)
    arguments = parser.parse_args()
    arguments.run(arguments)


def _add_device(command: argparse.ArgumentParser, run) -> None:
    command.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    command.add_argument("--rounds", type=int, help="interleaved repetitions (default 50, on a CPU 5)")
    command.add_argument("--out", type=Path, help="CSV to write")
    command.set_defaults(run=run)


def _machine(arguments: argparse.Namespace) -> tuple[gemm.Machine, int, dict[str, str], str]:
    """The machine, rounds, the rows' shared columns, and its conditions in words."""
    machine = gemm.Machine.here(arguments.device)
    on_cpu = machine.major is None
    rounds = arguments.rounds or (5 if on_cpu else 50)
    if rounds < 1:
        raise Fp4ReproError(f"--rounds is {rounds}, but must be 1 or more")
    where = {
        "device": provenance.device_name(machine.device),
        "torch": str(torch.__version__),
        "commit": provenance.commit(),
    }
    if on_cpu:
        keep_freed_memory()
    state = {} if on_cpu else cuda.conditions()
    words = "; ".join(f"{name} {value}" for name, value in state.items())
    print("; ".join(filter(None, (where["device"], f"torch {where['torch']}", words))), flush=True)
    return machine, rounds, where, words


def _gemm(arguments: argparse.Namespace) -> None:
    config = model_config(arguments.model)
    machine, rounds, where, words = _machine(arguments)
    tokens = arguments.tokens or (256 if machine.major is None else 8192)
    if tokens < MULTIPLE or tokens % MULTIPLE:
        raise Fp4ReproError(f"--tokens is {tokens}, but must be a multiple of {MULTIPLE}")
    results = []
    for result in gemm.measure(config, tokens, rounds, machine):
        results.append(result)
        print(gemm_rows.line(result), flush=True)
    found = list(gemm_rows.rows(arguments.model, results, machine, where))
    _write(arguments.out, [_with(row, words) for row in found])


def _casts(arguments: argparse.Namespace) -> None:
    machine, rounds, where, words = _machine(arguments)
    size = arguments.size or (1024 if machine.major is None else 8192)
    if size < MULTIPLE or size % MULTIPLE:
        raise Fp4ReproError(f"--size is {size}, but must be a multiple of {MULTIPLE}")
    found = casts.casts(size, machine.device)
    timings = casts.measure(found, rounds, machine.seconds_of)
    note = casts.conditions(size, rounds, machine.device)
    made = [_with(row, words) for row in casts.rows(found, timings, note, where)]
    for row in made:
        print(f"{row.setting:38} {row.metric:14} {row.value:10.4g} {row.unit}")
    _write(arguments.out, made)


def _with(row: Row, words: str) -> Row:
    """The row with the device's state in its note."""
    return dataclasses.replace(row, note="; ".join(filter(None, (row.note, words))))


def _write(path: Path | None, made: list[Row]) -> None:
    if path:
        write_rows(path, made)


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


def _scan(arguments: argparse.Namespace) -> None:
    if arguments.length < 1:
        raise Fp4ReproError(f"--length is {arguments.length}, but must be 1 or more")
    _report(scan, scan.Sizes(context=arguments.length), arguments)


def _ranks(arguments: argparse.Namespace) -> None:
    if arguments.rounds < 1:
        raise Fp4ReproError(f"--rounds is {arguments.rounds}, but must be 1 or more")
    sizes, device = ranks.Sizes(), provenance.device_name(torch.device("cpu"))
    words = ranks.conditions(sizes, 1, arguments.rounds)
    print(f"{device}; torch {torch.__version__}; {words}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        times = ranks.timings(sizes, arguments.rounds, Path(folder))
    where = {"device": device, "torch": str(torch.__version__), "commit": provenance.commit()}
    made = list(ranks.all_rows(times, sizes, words, where))
    print(core.table(ranks.measured(times)))
    for row in made:
        print(f"{row.setting:24} {row.metric:18} {row.value:10.4g} {row.unit}")
    _write(arguments.out, made)


def _optimizer(arguments: argparse.Namespace) -> None:
    if arguments.size < MULTIPLE or arguments.size % MULTIPLE:
        raise Fp4ReproError(f"--size is {arguments.size}, but must be a multiple of {MULTIPLE}")
    _report(optimizer, optimizer.Sizes(arguments.size), arguments)


def _report(bench: ModuleType, sizes: object, arguments: argparse.Namespace) -> None:
    """Measure, print and write one benchmark."""
    if arguments.threads < 1 or arguments.rounds < 1:
        raise Fp4ReproError(
            f"--threads is {arguments.threads} and --rounds {arguments.rounds}, but both must be 1 or more"
        )
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
