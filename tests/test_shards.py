"""Sharded runs (FSDP2): two gloo ranks against one to the byte; checkpoints that any number reads."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
from ranks import Ranks, options, write_scale
from test_checkpoint import failure

import fp4repro
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.report.runs import read_curve
from fp4repro.report.schema import ACTIVATION_BYTES, OPTIMIZER_BYTES
from fp4repro.train.shards import gradient_norm
from fp4repro.train.world import World

ROOT = Path(__file__).parents[1]
FILES = ("curve.csv", "model.safetensors")
STEPS = 8
SHARED = {"batch": 2, "accumulate": 2, "validation_tokens": 384, "checkpoint_every": 2, "parallel": "fsdp"}
WHOLE = SHARED | {"parallel": "ddp"}
NEVER = 1e9  # a gradient norm that no run has


@pytest.fixture(scope="module")
def processes():
    return ranks.processes()


@pytest.fixture(scope="module")
def scale(tmp_path_factory):
    """A micro-batch for each of two ranks; three validation windows, which two ranks cannot share evenly."""
    return write_scale(tmp_path_factory.mktemp("shards"), STEPS, **SHARED)


@pytest.fixture(scope="module")
def runs(processes, scale):
    """Finished runs by scale file and number of ranks, made once."""
    made = {}

    def folder(path, size, recipe="nvfp4", **more):
        out = scale.parent / f"{path.stem}-{size}-{recipe}"
        if out not in made:
            arguments = options(path, out, recipe, **more)
            made[out] = Ranks(processes, arguments, out.with_suffix(".said"), size)
            made[out].finish()
        return out

    return folder


def metrics(run: Path) -> list[str]:
    """But for the bytes that a rank holds, which shards are there to lower."""
    lines = (run / "metrics.csv").read_text().splitlines()
    return [line for line in lines if line.split(",")[2] not in (OPTIMIZER_BYTES, ACTIVATION_BYTES)]


def same(a: Path, b: Path) -> bool:
    return metrics(a) == metrics(b) and all((a / f).read_bytes() == (b / f).read_bytes() for f in FILES)


def test_two_ranks_with_shards_are_one_to_the_byte(runs, scale):
    """With stochastic rounding, clipping, and activations recomputed on the two."""
    recomputed = write_scale(scale.parent, STEPS, "recomputed", **SHARED, recompute_activations=True)
    one, two = runs(scale, 1), runs(recomputed, 2)
    assert max(read_curve(one, "step", "gradient_norm")[1]) > 1  # so that clipping is at work
    for name in ("curve.csv", "model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_shards_change_no_weight_where_nothing_is_clipped(runs, scale):
    """Gradients are the same sums; only the norm is summed in another order, and here decides nothing."""
    whole = write_scale(scale.parent, STEPS, "whole", **WHOLE, clip=NEVER)
    shards = write_scale(scale.parent, STEPS, "unclipped", **SHARED, clip=NEVER)
    one, two = runs(whole, 1), runs(shards, 2)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    for column in ("train_loss", "validation_loss"):
        assert read_curve(one, "step", column) == read_curve(two, "step", column)
    norms = zip(*(read_curve(run, "step", "gradient_norm")[1] for run in (one, two)), strict=True)
    assert all(abs(a - b) <= 3e-6 * a for a, b in norms)
    assert (one / "model.safetensors").read_bytes() != (runs(scale, 1) / "model.safetensors").read_bytes()


def test_gradients_in_bf16_are_the_same_sums_on_shards(runs, scale):
    whole = write_scale(scale.parent, STEPS, "whole-bf16", **WHOLE, clip=NEVER, gradients="bf16")
    shards = write_scale(scale.parent, STEPS, "shards-bf16", **SHARED, clip=NEVER, gradients="bf16")
    one, two = runs(whole, 1), runs(shards, 2)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    # Another run than in FP32, and not by much.
    fp32 = runs(write_scale(scale.parent, STEPS, "whole", **WHOLE, clip=NEVER), 1)
    losses = zip(*(read_curve(run, "step", "train_loss")[1] for run in (one, fp32)), strict=True)
    assert 0 < max(abs(a - b) / b for a, b in losses) < 0.01


@pytest.mark.slow
def test_gradients_in_bf16_on_two_whole_models(runs, scale):
    whole = write_scale(scale.parent, STEPS, "ddp-bf16", **WHOLE, gradients="bf16")
    assert same(runs(whole, 1), runs(whole, 2))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4-lora-svd", "bf16", "mxfp4", "fp8"])
def test_other_recipes_on_shards(runs, scale, recipe):
    assert same(runs(scale, 1, recipe), runs(scale, 2, recipe))


@pytest.mark.slow
def test_a_late_switch_to_bf16_on_shards(runs, scale):
    one, two = (runs(scale, size, "late_all", protocol="ablations") for size in (1, 2))
    assert (one / "curve.csv").read_bytes() == (two / "curve.csv").read_bytes()
    assert metrics(one) == metrics(two)


@pytest.mark.slow
def test_four_micro_batches_on_two_ranks_differ_by_the_order_of_sums(runs, scale):
    """(a + b) + (c + d) against ((a + b) + c) + d, in BF16 products: the bound is FP32's."""
    four = write_scale(scale.parent, STEPS, "four", **SHARED | {"batch": 4, "accumulate": 4})
    one, two = runs(four, 1, "bf16"), runs(four, 2, "bf16")
    first, second = (read_curve(run, "step", "train_loss")[1] for run in (one, two))
    assert abs(first[0] - second[0]) <= 1e-6 * first[0]
    assert max(abs(a - b) / a for a, b in zip(first, second, strict=True)) <= 1e-3
    assert not same(one, two)


@pytest.mark.parametrize("recipe", ["full-stack-fp4", "full-stack-fp4-muon"])
def test_states_in_four_bits_on_shards(processes, runs, scale, tmp_path, recipe):
    """Two ranks killed and gone on with, by two ranks and then by one, against one rank unbroken."""
    out = tmp_path / "run"
    for number, (size, kill_at) in enumerate(((2, 3), (2, 5), (1, None))):
        running = Ranks(processes, options(scale, out, recipe), tmp_path / f"said-{number}", size)
        if kill_at is None:
            running.finish()
        else:
            running.wait_for(f"step {kill_at}/{STEPS}")
            running.kill(1)
        assert ("goes on from step" in running.words()) == (number > 0)
    assert same(out, runs(scale, 1, recipe))
    assert not same(out, runs(scale, 1))


# Checkpoints


def newest(out: Path) -> Path | None:
    folders = sorted((out / "checkpoints").glob("step-*"))
    return folders[-1] if folders else None


def test_a_run_killed_on_each_rank_goes_on_with_two_ranks_and_with_one(processes, runs, scale, tmp_path):
    """SIGKILL at any moment after the first checkpoint, first to rank 0, then to rank 1."""
    out, chance = tmp_path / "run", random.SystemRandom()
    for victim, steps in ((0, (2, 4)), (1, (5, STEPS))):
        running = Ranks(processes, options(scale, out, "nvfp4"), tmp_path / f"said-{victim}", 2)
        kill_at = chance.randrange(*steps)
        running.wait_for(f"step {kill_at}/{STEPS}")
        while not newest(out):  # a step is told before its checkpoint is written
            time.sleep(0.01)
        time.sleep(chance.random() / 4)
        running.kill(victim)
        assert running.processes[victim].exitcode == -signal.SIGKILL
        assert not (out / "metrics.csv").exists() and newest(out)
        if victim == 1:
            assert "goes on from step" in running.words()
    last = Ranks(processes, options(scale, out, "nvfp4"), tmp_path / "said-last", 1)
    last.finish()
    assert "goes on from step" in last.words()
    assert same(out, runs(scale, 1))
    assert {p.name for p in out.iterdir()} == {*FILES, "metrics.csv", "run.json", "layers.csv"}


@pytest.fixture(scope="module")
def stopped(processes, scale):
    """The folder of a run on two ranks that kept two checkpoints and was killed after the third."""
    path = write_scale(scale.parent, STEPS, "kept", **SHARED, keep_checkpoints=2)
    out = scale.parent / "stopped"
    running = Ranks(processes, options(path, out), scale.parent / "said-stopped", 2)
    running.wait_for(f"step 7/{STEPS}")
    running.kill(1)
    assert [p.name[-1] for p in sorted((out / "checkpoints").glob("step-*"))] == ["4", "6"]
    return path, out


def damaged(folder: Path, name: str) -> None:
    (path,) = folder.glob(name)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda f: damaged(f, "__0_0.distcp"), "__0_0.distcp is not what was written): delete this folder"),
        (lambda f: damaged(f, "__1_0.distcp"), "__1_0.distcp is not what was written"),
        (lambda f: damaged(f, ".metadata"), ".metadata is not what was written"),
        (lambda f: damaged(f, "manifest.pt"), "manifest.pt is not what was written"),
        (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is not what was written"),
        (lambda f: [p.unlink() for p in f.iterdir()], "manifest.pt is not what was written"),
    ],
)
def test_a_damaged_one_is_one_sentence(stopped, tmp_path, harm, expected, monkeypatch, capsys):
    path, out = stopped
    shutil.copytree(out, tmp_path / "run")
    harm(newest(tmp_path / "run"))
    error = failure(options(path, tmp_path / "run"), monkeypatch, capsys)
    assert "step-0000000006 is truncated or damaged" in error and expected in error


def test_one_of_other_settings_or_form_is_one_sentence(stopped, scale, tmp_path, monkeypatch, capsys):
    path, out = stopped
    shutil.copytree(out, tmp_path / "run")
    error = failure(options(path, tmp_path / "run", seed=1), monkeypatch, capsys)
    assert (
        "is of a run with other settings: seed was 0 and now is 1; restore it, or delete checkpoints" in error
    )
    whole = write_scale(scale.parent, STEPS, "whole", **WHOLE, clip=NEVER)
    error = failure(options(whole, tmp_path / "run"), monkeypatch, capsys)
    assert "checkpoints is of a run with training.parallel: fsdp, which now is ddp" in error
    (tmp_path / "checkpoint.pt").touch()
    error = failure(options(path, tmp_path), monkeypatch, capsys)
    assert "checkpoint.pt is of a run with training.parallel: ddp, which now is fsdp" in error


def test_the_one_before_a_damaged_one_serves_when_that_is_deleted(processes, stopped, runs, tmp_path):
    path, out = stopped
    shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(newest(tmp_path / "run"))
    half = tmp_path / "run" / "checkpoints" / ".step-0000000006"
    half.mkdir()  # what a killed write leaves
    (half / "__0_0.distcp").write_bytes(b"half")
    last = Ranks(processes, options(path, tmp_path / "run"), tmp_path / "said", 1)
    last.finish()
    assert "goes on from step 4" in last.words()
    assert same(tmp_path / "run", runs(path, 1, "bf16"))


def command(scale: Path, out: Path, size: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return [
        sys.executable,
        *(launcher if size > 1 else []),
        "-m",
        "fp4repro.train",
        *options(scale, out, "nvfp4"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("then", [1, 2])
def test_torchrun_with_a_rank_killed(runs, scale, tmp_path, victim, then):
    out = tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FP4REPRO_COMPILE": "0"}
    with subprocess.Popen(command(scale, out, 2), env=environment, stderr=subprocess.DEVNULL) as running:
        while not newest(out) and running.poll() is None:
            time.sleep(0.02)
        listed = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True)
        children = [int(pid) for pid in listed.stdout.split()]
        assert len(children) == 2, "both ranks are at work when one is killed"
        os.kill(children[victim], signal.SIGKILL)
        assert running.wait(120) != 0
    assert not (out / "metrics.csv").exists()
    done = subprocess.run(
        command(scale, out, then), env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "goes on from step" in done.stderr
    assert same(out, runs(scale, 1))


# Parts


@pytest.mark.parametrize(
    ("recipe", "protocol", "expected"),
    [
        ("trained_factors", "fullstack", "trainable LoRA factors, which are split from whole weights"),
        ("bf16", "trunk", "trunks and branches, which are kept in one file"),
    ],
)
def test_what_cannot_be_sharded_is_one_sentence(
    scale, tmp_path, recipe, protocol, expected, monkeypatch, capsys
):
    error = failure(options(scale, tmp_path, recipe, protocol=protocol), monkeypatch, capsys)
    assert f"training.parallel is fsdp, but recipe {recipe} has {expected}: set it to ddp" in error


def test_ranks_run_in_step_only_where_they_must():
    def dealt(parallel):
        return [list(World(rank, 2, parallel).deal("abc")) for rank in range(2)]

    assert dealt("ddp") == [[("a", True), ("c", True)], [("b", True)]]
    assert dealt("fsdp") == [[("a", True), ("c", True)], [("b", True), ("a", False)]]


def test_the_gradient_norm_does_not_depend_on_the_sharding():
    """Shards of one gradient, in any cut, against float64."""
    gradient = torch.randn(1000, 7, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)
    expected = gradient.double().square().sum().sqrt().float()
    for cut in (1, 250, 999):
        parts = [torch.nn.Parameter(torch.zeros_like(part)) for part in gradient.split(cut)]
        for parameter, part in zip(parts, gradient.split(cut), strict=True):
            parameter.grad = part
        assert torch.equal(gradient_norm(parts, lambda total: total), expected)


def tiny(recipe: str) -> HybridModel:
    config = ModelConfig.from_yaml(ROOT / "configs" / "models" / "tiny.yaml").replace(vocabulary=128)
    model = HybridModel(config, generator=torch.Generator().manual_seed(0))
    fp4repro.convert(model, fp4repro.recipe(recipe))
    return model


def gradients_and_saved(model: HybridModel, recompute: bool, microbatch: int) -> tuple[list, int]:
    """All gradients, and the bytes of what waits for the backward pass when the forward pass is over."""
    model.recompute = recompute
    tokens = torch.randint(128, (1, 129), generator=torch.Generator().manual_seed(1))
    fp4repro.set_step(model, 0, microbatch)
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    saved = sum(storages.values())
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()], saved


def equal(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_recomputed_activations_give_the_same_bits_from_less_memory(eager):
    model = tiny("nvfp4")
    kept, many = gradients_and_saved(model, False, 0)
    again, few = gradients_and_saved(model, True, 0)
    assert equal(kept, again)
    assert few < many / 2


def test_the_same_tokens_on_another_rank_are_rounded_otherwise(eager):
    """A rank's stream is that of the micro-batches it has; without stochastic rounding nothing differs."""
    nvfp4 = fp4repro.recipe("nvfp4")
    for recipe, alike in ((nvfp4, False), (nvfp4.replace(stochastic=()), True)):
        model = tiny("bf16")
        fp4repro.convert(model, recipe)
        first, second = (gradients_and_saved(model, False, number)[0] for number in (0, 1))
        assert equal(first, second) == alike
