"""Short runs of the tiny model on made-up text, alone or on several ranks, in processes that start fast."""

import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
import yaml

from fp4repro.config import load_scale
from fp4repro.data.tokens import prepare
from fp4repro.errors import run_stage
from fp4repro.train.__main__ import main

CONTEXT = 128


def write_scale(folder: Path, steps: int, name: str = "short", **training) -> Path:
    """A scale file of so many steps, beside the token files of a text that is made up once."""
    files = [folder / "train.txt", folder / "held.txt"]
    if not files[0].exists():
        letters = np.random.default_rng(0).choice(list("etaoin shrdlu,.\n"), 40_000)
        for path, part in zip(files, (letters[:30_000], letters[30_000:]), strict=True):
            path.write_text("".join(part))
    batch = training.get("batch", 1)
    document = {
        "scale": name,
        "description": "A few steps of the tiny model.",
        "model": "tiny",
        "corpus": {"files": [str(files[0])], "validation": [str(files[1])]},
        "tokenizer": {"vocabulary": 384},
        "training": {
            "tokens": steps * batch * CONTEXT,
            "batch": batch,
            "context": CONTEXT,
            "learning_rate": 2e-3,
            "validation_every": 5,
            "validation_tokens": 256,
            "checkpoint_every": 3,
        }
        | training,
        "pretrain": {"recipes": ["bf16", "nvfp4"], "seeds": [0]},
        "ablations": {"branch_from": 0.5, "branch_steps": steps // 2},
        "device": "cpu",
        "log_every": 1,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    if not (folder / "data").exists():
        prepare(load_scale(path), folder / "data")
    return path


def options(scale: Path, out: Path, recipe: str = "bf16", seed: int = 0, data: Path | None = None, **more):
    named = {
        "scale": scale,
        "recipe": recipe,
        "seed": seed,
        "data": data or scale.parent / "data",
        "out": out,
    }
    return [f"--{name}={value}" for name, value in (named | more).items()]


def processes() -> multiprocessing.context.BaseContext:
    """Starts processes that have imported torch already, which takes longer than these runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch._dynamo",
            "fp4repro.train.__main__",
            "fp4repro.train.sharded_checkpoint",
            "torch.distributed.fsdp",
        ]
    )
    return context


def run(arguments: list[str], said: Path, rank: int = 0, size: int = 1, port: int = 0) -> None:
    """The command as a process's whole life, with torchrun's variables; what it says goes to a file."""
    os.environ["FP4REPRO_COMPILE"] = "0"  # the same bits as compiled, without the wait
    if size > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "localhost"} | {name: str(value) for name, value in place.items()}
    sys.argv[1:] = arguments
    os.dup2(os.open(said, os.O_WRONLY | os.O_TRUNC), sys.stderr.fileno())
    run_stage("fp4repro.train", main)


class Ranks:
    """One run that is going on, on `size` ranks."""

    def __init__(self, context, arguments: list[str], said: Path, size: int = 1) -> None:
        self.said = [said.with_name(f"{said.name}.{rank}") for rank in range(size)]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.processes = []
        for rank, path in enumerate(self.said):
            path.touch()
            process = context.Process(target=run, args=(arguments, path, rank, size, port))
            process.start()
            self.processes.append(process)

    def wait_for(self, words: str) -> None:
        """Until the first rank has said so."""
        while words not in self.said[0].read_text():
            assert self.processes[0].is_alive(), self.words()
            time.sleep(0.01)

    def kill(self, rank: int) -> None:
        """SIGKILL to one rank, and, as a launcher would see to, to all others then."""
        self.processes[rank].kill()
        for process in self.processes:
            process.kill()
            process.join()

    def finish(self) -> None:
        for process in self.processes:
            process.join()
        assert {process.exitcode for process in self.processes} == {0}, self.words()

    def words(self) -> str:
        return "\n".join(path.read_text() for path in self.said)
