"""Runs on several ranks: two gloo processes on a CPU against one, to the bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fp4repro.errors import Fp4ReproError
from fp4repro.train.world import World

ROOT = Path(__file__).parents[1]
FILES = ("metrics.csv", "curve.csv", "model.safetensors")
STEPS, TOKENS_A_STEP = 6, 4 * 128


def write_scale(folder: Path, accumulate: int, **changes) -> Path:
    scale = yaml.safe_load((ROOT / "configs" / "scales" / "smoke.yaml").read_text())
    scale["training"] |= {"tokens": STEPS * TOKENS_A_STEP, "batch": 4, "accumulate": accumulate}
    scale["training"] |= {"validation_every": 3, "validation_tokens": 2048, "checkpoint_every": 2} | changes
    scale["corpus_bytes"] = {"train": 400_000, "validation": 40_000}
    scale["scale"] = "small"
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(scale))
    return path


def command(ranks: int, scale: Path, data: Path, out: Path, recipe: str = "nvfp4") -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    stage = ["-m", "fp4repro.train", "--scale", scale, "--recipe", recipe, "--seed", 0]
    return [
        *map(str, [sys.executable, *(launcher if ranks > 1 else []), *stage, "--data", data, "--out", out])
    ]


def run(*arguments, **others) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command(*arguments, **others), env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    scale = write_scale(folder, 2)
    stage = [sys.executable, "-m", "fp4repro.data", "--scale", scale, "--out", folder / "data"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("FP4REPRO_DATA", None)
    done = subprocess.run([*map(str, stage)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "data"


def same_files(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in FILES)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """One rank with two micro-batches a step."""
    folder = tmp_path_factory.mktemp("alone")
    done = run(1, write_scale(folder, 2), data, folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_two_ranks_are_one_to_the_bit_with_stochastic_rounding_too(data, alone, tmp_path):
    done = run(2, write_scale(tmp_path, 2), data, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert same_files(alone, tmp_path / "two")


@pytest.mark.slow
def test_other_micro_batches_are_another_run(data, alone, tmp_path):
    other = run(1, write_scale(tmp_path, 1), data, tmp_path / "other")  # one micro-batch: other operands
    assert other.returncode == 0, other.stderr
    assert not same_files(alone, tmp_path / "other")


@pytest.mark.slow
def test_micro_batches_that_ranks_cannot_share_are_a_sentence(data, tmp_path):
    done = run(2, write_scale(tmp_path, 1), data, tmp_path / "run")
    assert done.returncode != 0
    assert "training.accumulate is 1, which 2 ranks cannot share evenly" in done.stderr
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_shares_must_be_even():
    World(size=3).check(6)
    with pytest.raises(Fp4ReproError, match="set it to a multiple of 3"):
        World(size=3).check(4)


def test_shares_and_what_is_gathered():
    assert [list(World(rank, 3).share(6)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert World().gather([1.0, 2.0]) == [1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("then", [1, 2])
def test_a_rank_killed_is_resumed_on_any_number_of_ranks(data, alone, tmp_path, victim, then):
    """SIGKILL to one rank once there is a checkpoint; the launcher ends the other one."""
    scale, out = write_scale(tmp_path, 2), tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command(2, scale, data, out), env=environment, stderr=subprocess.DEVNULL)
    while not (out / "checkpoint.pt").exists() and running.poll() is None:
        time.sleep(0.02)
    children = subprocess.run(
        ["pgrep", "-P", str(running.pid)], capture_output=True, text=True
    ).stdout.split()
    assert len(children) == 2, "both ranks are at work when one is killed"
    os.kill(int(children[victim]), signal.SIGKILL)
    assert running.wait(60) != 0
    assert not (out / "metrics.csv").exists()
    done = run(then, scale, data, out)
    assert done.returncode == 0, done.stderr
    assert "goes on from step" in done.stderr
    assert same_files(alone, out)
