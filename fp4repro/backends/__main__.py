"""`python -m fp4repro.backends`: which ways to multiply NVFP4 work on this machine, and why not."""

import argparse

import torch

from fp4repro.backends import BACKENDS, probe, transformer_engine
from fp4repro.backends.probe import default_device
from fp4repro.core.compiled import compiler_usable
from fp4repro.errors import run_stage


def main() -> None:
    argparse.ArgumentParser(
        prog="fp4repro.backends",
        description="Try each way to multiply NVFP4 on this machine: one forward and backward.",
    ).parse_args()
    rows = [("backend", "usable", "reason")]
    for name in BACKENDS:
        answer = probe(name)
        rows.append((name, "yes" if answer.usable else "no", answer.reason))
    rows.append(("", "", ""))
    rows += [(what, "", value) for what, value in _machine()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, usable, reason in rows:
        print(f"{name:{widths[0]}}  {usable:{widths[1]}}  {reason}".rstrip())


def _machine() -> list[tuple[str, str]]:
    compiler = "usable" if compiler_usable() else "none: the emulation runs eagerly, same results"
    return [
        ("device", _device()),
        ("torch", torch.__version__),
        ("CUDA", torch.version.cuda or "not in this build of torch"),
        ("Transformer Engine", transformer_engine.version() or "not installed"),
        ("compiler", compiler),
    ]


def _device() -> str:
    if default_device().type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    run_stage("fp4repro.backends", main)
