"""Checkpoints: whole or refused, of the same run or refused; and runs that are killed go on."""

import json
import random
import signal
import sys
from pathlib import Path

import pytest
import ranks
import torch
import yaml
from ranks import Ranks, options, write_scale

from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.train.__main__ import main
from fp4repro.train.checkpoint import load_checkpoint, save_checkpoint

SETTINGS = {"recipe": "nvfp4", "seed": 0, "training.betas": (0.9, 0.95), "corpus": {"files": ["a"]}}


def make(path):
    state = {
        "model": {"weight": torch.arange(1000.0)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        "curve": [[1, 128, 1e-3, 5.5, 0.7, None]],
        "sessions": [{"commit": "abc"}],
    }
    save_checkpoint(path, SETTINGS, state)
    return state


def test_what_was_saved_comes_back(tmp_path):
    path = tmp_path / "checkpoint.pt"
    state = make(path)
    loaded = load_checkpoint(path, SETTINGS)
    assert torch.equal(loaded["model"].pop("weight"), state["model"].pop("weight"))
    assert loaded == state
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_no_checkpoint_is_none(tmp_path):
    assert load_checkpoint(tmp_path / "checkpoint.pt", SETTINGS) is None


def test_what_a_killed_write_left_is_cleared(tmp_path):
    path = tmp_path / "checkpoint.pt"
    make(path)
    half, other = tmp_path / ".checkpoint.pt.x1y2.pt", tmp_path / ".curve.csv.z.csv"
    half.write_bytes(b"half")
    other.touch()
    assert load_checkpoint(path, SETTINGS)
    assert not half.exists() and other.exists()


def test_saving_again_replaces_it(tmp_path):
    path = tmp_path / "checkpoint.pt"
    make(path)
    save_checkpoint(path, SETTINGS, {"curve": [1, 2]})
    assert load_checkpoint(path, SETTINGS) == {"curve": [1, 2]}


@pytest.mark.parametrize("kept", [0, 1, 50, 86, 87, 88, 500, 2000, -1])
def test_a_truncated_one_is_refused(tmp_path, kept):
    path = tmp_path / "checkpoint.pt"
    make(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(Fp4ReproError, match=r"is truncated or damaged \(checksum .*: delete it to"):
        load_checkpoint(path, SETTINGS)


@pytest.mark.parametrize("place", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_one_flipped_bit_is_refused(tmp_path, place):
    path = tmp_path / "checkpoint.pt"
    make(path)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(Fp4ReproError, match="truncated or damaged"):
        load_checkpoint(path, SETTINGS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 1}, "seed was 0 and now is 1"),
        ({"recipe": "bf16", "seed": 1}, "recipe was 'nvfp4' and now is 'bf16'"),
        ({"training.betas": (0.9, 0.99)}, r"training\.betas was \(0\.9, 0\.95\) and now is"),
        ({"new": 1}, "new was None and now is 1"),
    ],
)
def test_one_of_other_settings_is_refused(tmp_path, changes, expected):
    path = tmp_path / "checkpoint.pt"
    make(path)
    with pytest.raises(Fp4ReproError, match=f"other settings: {expected}"):
        load_checkpoint(path, SETTINGS | changes)
    fewer = {key: value for key, value in SETTINGS.items() if key != "corpus"}
    with pytest.raises(Fp4ReproError, match=r"corpus was .* and now is None"):
        load_checkpoint(path, fewer)


def test_a_failed_write_leaves_the_old_one(tmp_path):
    path = tmp_path / "checkpoint.pt"
    make(path)
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        save_checkpoint(path, SETTINGS, {"not picklable": lambda: None})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


# Real runs, in processes of their own

STEPS = 16


@pytest.fixture(scope="module")
def scale(tmp_path_factory):
    return write_scale(tmp_path_factory.mktemp("scale"), STEPS)


@pytest.fixture(scope="module")
def processes():
    return ranks.processes()


@pytest.fixture(scope="module")
def trunk(processes, scale):
    """A BF16 run's first half, which branches leave."""
    out = scale.parent / "trunk"
    Ranks(processes, options(scale, out, protocol="trunk"), scale.parent / "said").finish()
    return out / "trunk.pt"


@pytest.mark.parametrize(
    ("recipe", "protocol"),
    [("bf16", "pretrain"), ("nvfp4", "pretrain"), ("late_all", "ablations"), ("sr_weights", "branches")],
)
def test_a_killed_run_goes_on_bit_for_bit(processes, scale, trunk, tmp_path, recipe, protocol):
    # Any step after the first checkpoint; late_all goes to BF16 at step 14, after the checkpoint at 12.
    first = {"branches": 10, "ablations": 13}.get(protocol, 4)
    kill_at = random.SystemRandom().randrange(first, STEPS)
    more = {"protocol": protocol} | ({"trunk": trunk} if protocol == "branches" else {})

    def start(out):
        arguments = options(scale, tmp_path / out, recipe, **more)
        return Ranks(processes, arguments, tmp_path / f"{out}.txt")

    broken = tmp_path / "broken"
    unbroken, victim = start("unbroken"), start("broken")
    victim.wait_for(f"step {kill_at}/{STEPS}")
    victim.kill(0)
    assert victim.processes[0].exitcode == -signal.SIGKILL
    assert {p.name for p in broken.iterdir() if p.name[0] != "."} == {"checkpoint.pt"}

    start("broken").finish()
    unbroken.finish()
    files = {path.name for path in (tmp_path / "unbroken").iterdir()}
    assert ("model.safetensors" in files) == (protocol == "pretrain")
    for name in files - {"run.json"}:
        same = (broken / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()
        assert same, f"{name} differs after a kill at step {kill_at}"
    assert not (broken / "checkpoint.pt").exists()
    about = json.loads((broken / "run.json").read_text())
    first, second = (session["from_step"] for session in about["sessions"])
    assert first == (STEPS // 2 if protocol == "branches" else 0) < second <= kill_at
    quantises = recipe != "bf16" and not (recipe == "late_all" and second > 13)
    assert bool(about["sessions"][1]["operands_quantised"]) == quantises


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"recipe": "nvfp5"}, "is named 'nvfp5'; did you mean 'nvfp4'?"),
        ({"data": Path("none")}, "none has no data.json, so no token files: run python -m fp4repro"),
        ({"seed": -1}, "the seed is -1, but must be from 0 to 4294967295"),
        ({"recipe": "no_srr"}, "named 'no_srr'; did you mean 'no_sr'?"),
        ({"protocol": "branches"}, "--protocol branches and --trunk FILE belong together"),
        ({"protocol": "branches", "trunk": Path("none.pt")}, "none.pt does not exist: train the trunk of"),
    ],
)
def test_bad_options_are_one_sentence(scale, tmp_path, changes, expected, monkeypatch, capsys):
    assert expected in failure(options(scale, tmp_path, **changes), monkeypatch, capsys)


def test_a_trunk_of_another_seed_is_one_sentence(scale, trunk, tmp_path, monkeypatch, capsys):
    arguments = options(scale, tmp_path, seed=1, protocol="branches", trunk=trunk)
    error = failure(arguments, monkeypatch, capsys)
    assert "trunk.pt is of a run with other settings: seed was 0 and now is 1" in error


def test_a_damaged_checkpoint_is_one_sentence(scale, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoint.pt").write_bytes(b"fp4repro checkpoint 1\n")
    error = failure(options(scale, tmp_path), monkeypatch, capsys)
    assert "checkpoint.pt is truncated or damaged (checksum " in error


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"width": 100}, "100"),
        ({"widht": 128}, "has no key 'widht'; did you mean 'width'?"),
    ],
)
def test_a_model_that_does_not_fit_is_one_sentence(scale, tmp_path, overrides, expected, monkeypatch, capsys):
    document = yaml.safe_load(scale.read_text()) | {"model_overrides": overrides}
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(document))
    arguments = options(path, tmp_path, data=scale.parent / "data")
    error = failure(arguments, monkeypatch, capsys)
    assert "model tiny with the model_overrides of scale short" in error and expected in error


def failure(arguments, monkeypatch, capsys):
    """The one sentence with which the command ends."""
    monkeypatch.setattr(sys, "argv", ["fp4repro.train", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_stage("fp4repro.train", main)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fp4repro.train: error: ")
    return line


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    """torch.save hides the reason of a write that failed behind its own words."""

    def full(self, piece):
        self.failure = OSError(28, "No space left on device")
        raise self.failure

    monkeypatch.setattr("fp4repro.train.checkpoint._Hashed.write", full)
    with pytest.raises((Fp4ReproError, OSError), match="No space left on device"):
        save_checkpoint(tmp_path / "checkpoint.pt", {}, {"weights": torch.ones(4)})
    assert not list(tmp_path.iterdir())
