"""Health of a run's tensors: what it says against brute force, and that looking changes no bit."""

import csv
import dataclasses
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import fp4repro
from fp4repro.config import load_scale
from fp4repro.data.tokens import TokenData
from fp4repro.errors import Fp4ReproError
from fp4repro.recipes import LateBF16
from fp4repro.train.evaluate import held_out
from fp4repro.train.health import COLUMNS, GRADIENT
from fp4repro.train.job import Job, model_of
from fp4repro.train.monitor import Monitor

SMOKE = Path(__file__).parents[1] / "configs" / "scales" / "smoke.yaml"
STEPS, EVERY = 6, 3
SLOTS = {"x_fprop", "w_fprop", "dy_dgrad", "dy_wgrad", "x_wgrad"}  # W is the same for dgrad
pytestmark = pytest.mark.usefixtures("eager")


def job(recipe="nvfp4", **changes):
    smoke = load_scale(SMOKE)
    training = dataclasses.replace(
        smoke.training,
        **{"batch": 2, "context": 128, "accumulate": 2, "tokens": STEPS * 256, "validation_every": EVERY},
        validation_tokens=256,
    )
    scale = dataclasses.replace(smoke, training=training, health_every=EVERY, **changes)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 512, 4000).astype(np.uint16)
    data = TokenData(tokens, tokens[:1000], np.ones(512, dtype=np.int64), {})
    recipe = recipe if isinstance(recipe, fp4repro.Recipe) else fp4repro.recipe(recipe)
    return Job(scale, model_of(scale), recipe, 0, data, torch.device("cpu"))


def train(of, out, after=lambda run: None, state=None, until=STEPS):
    """A run followed by a monitor, from a state where one is given; stops after `until` steps."""
    run = of.begin()
    if state:
        run.restore(state)
    monitor = Monitor(run, of.scale, out)

    def after_step():
        monitor.after_step()
        after(run)
        if run.step == until:
            raise StopIteration

    try:
        run.train(of.batches, held_out(of.data, run.settings), after_step)
    except StopIteration:
        if until == STEPS:
            monitor.finish()
    return run


def rows_of(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and tuple(rows[0]) == COLUMNS
    return {(int(r["step"]), r["name"], r["slot"]): r for r in rows}


@pytest.fixture(scope="module")
def looked(tmp_path_factory):
    """A run with health, with the weights before and the gradients after its third step, and the first input
    of one layer in that step."""
    with pytest.MonkeyPatch.context() as patch:
        from eagerly import run_eagerly

        run_eagerly(patch)
        out, of = tmp_path_factory.mktemp("looked"), job()
        kept = {"inputs": []}

        def after(run):
            linears = {n: m for n, m in run.model.named_modules() if isinstance(m, nn.Linear)}
            if run.step == EVERY - 1:
                kept["weights"] = {n: m.weight.detach().clone() for n, m in linears.items()}
                kept["hook"] = linears["blocks.1.mixer.up"].register_forward_hook(
                    lambda _, inputs, output: kept["inputs"].append(inputs[0].detach().to(output.dtype))
                )
            if run.step == EVERY:
                kept["gradients"] = {n: m.weight.grad.clone() for n, m in linears.items()}
                kept["hook"].remove()

        run = train(of, out, after)
        return run, rows_of(out / "health.csv"), kept


def brute(x, block):
    """Zero, flushed and clipped shares and zero scales of NVFP4 in float32, block by block, by numpy."""
    x = np.asarray(x, np.float32)
    s_enc = np.float32(np.float32(2688) / np.abs(x).max())
    high, wide = block
    zeros = flushed = clipped = zero_scales = blocks = 0
    for i in range(0, x.shape[0], high):
        for j in range(0, x.shape[1], wide):
            b = x[i : i + high, j : j + wide]
            scale = np.float32(np.abs(b).max() * np.float32(s_enc * np.float32(1 / 6)))
            scale = np.float32(min(scale, 448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            if not np.abs(b).max():
                zeros += b.size
                continue
            blocks += 1
            zero_scales += scale == 0
            scaled = np.abs(b) / scale * s_enc if scale else np.zeros_like(b)
            zeros += (scaled <= 0.25).sum()
            flushed += ((scaled <= 0.25) & (b != 0)).sum()
            clipped += (scaled > 6 * (1 + 1e-6)).sum()
    kept = (x != 0).sum()
    return zeros / x.size, flushed / kept, clipped / kept, zero_scales / blocks


def assert_equals(row, x, block):
    zero, flushed, clipped, zero_scales = brute(x, block)
    assert float(row["amax"]) == np.abs(x).max()
    for name, expected in (("zero", zero), ("flushed", flushed), ("clipped", clipped)):
        assert float(row[name]) == pytest.approx(expected, abs=2 / x.size), name  # a value at a bound
    assert float(row["zero_scales"]) == zero_scales
    assert 0 < float(row["zero"]) < 0.5 and float(row["clipped"]) > 0  # not an empty comparison


def test_weights_and_inputs_are_counted_as_brute_force_does(looked):
    _, rows, kept = looked
    name = "blocks.1.mixer.up"
    assert_equals(rows[EVERY, name, "w_fprop"], kept["weights"][name].numpy(), (16, 16))
    first = kept["inputs"][0].flatten(0, -2).float().numpy()  # of the first micro-batch
    assert_equals(rows[EVERY, name, "x_fprop"], first, (1, 16))


def test_gradients_have_their_zeros_counted(looked):
    _, rows, kept = looked
    gradients = {name: row for (step, name, slot), row in rows.items() if (step, slot) == (EVERY, GRADIENT)}
    assert set(gradients) == set(kept["gradients"])  # linears in BF16 too, and the head
    for name, row in gradients.items():
        gradient = kept["gradients"][name].numpy()
        assert float(row["zero"]) == np.mean(gradient == 0)
        assert float(row["amax"]) == np.abs(gradient).max()
    assert any(float(row["zero"]) for row in gradients.values())


def test_every_slot_of_every_quantised_linear_has_a_row_a_time(looked):
    run, rows, _ = looked
    swapped = run.phases.conversion.swapped
    wanted = {(step, n, s) for step in (3, 6) for n in swapped for s in SLOTS}
    assert {key for key in rows if key[2] != GRADIENT} == wanted


@pytest.mark.parametrize("recipe", ["nvfp4", "full-stack-fp4"])
def test_a_run_has_the_same_bits_with_and_without(tmp_path, recipe):
    with_it = train(job(recipe), tmp_path / "with")
    without = train(
        dataclasses.replace(job(recipe), scale=dataclasses.replace(job().scale, health_every=None)), tmp_path
    )
    assert rows_of(tmp_path / "with" / "health.csv") and not list(tmp_path.glob("health*"))
    assert with_it.curve == without.curve
    for (name, a), b in zip(
        with_it.model.state_dict().items(), without.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_a_killed_run_has_each_row_once(looked, tmp_path):
    """Killed after step 3, whose checkpoint is of step 2, in the middle of a line."""
    state = {}
    train(
        job(),
        tmp_path,
        lambda run: state.update(_copied(run.state())) if run.step == 2 else None,
        until=3,
    )
    unfinished = tmp_path / "health.part.csv"
    assert rows_of(unfinished) and not (tmp_path / "health.csv").exists()
    with open(unfinished, "a") as file:
        file.write("2,blocks.0")
    train(job(), tmp_path, state=state)
    assert not unfinished.exists()
    assert rows_of(tmp_path / "health.csv") == looked[1]
    lines = (tmp_path / "health.csv").read_text().splitlines()
    assert len(lines) == 1 + len(looked[1])


def _copied(state):
    import copy

    return copy.deepcopy(state)


def test_a_late_switch_has_the_rows_of_what_it_switches_to(tmp_path):
    recipe = fp4repro.recipe("nvfp4").replace(late_bf16=LateBF16(after=0.5, products=("dgrad", "wgrad")))
    train(job(recipe), tmp_path)
    rows = rows_of(tmp_path / "health.csv")
    assert {slot for step, _, slot in rows if step == 3} == {*SLOTS, GRADIENT}
    assert {slot for step, _, slot in rows if step == 6} == {"x_fprop", "w_fprop", GRADIENT}


# TensorBoard


def test_without_the_package_it_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        Fp4ReproError, match=r"pip install 'fp4repro\[tensorboard\]', or set tensorboard: false"
    ):
        train(job(tensorboard=True), tmp_path)


def test_events_are_the_curve_and_the_rows(looked, tmp_path, monkeypatch):
    class Writer:
        def __init__(self, folder, purge_step):
            events.append((folder, purge_step))

        def add_scalar(self, tag, value, step):
            events.append((tag, value, step))

        def close(self):
            events.append("closed")

    events = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    run = train(job(tensorboard=True), tmp_path)
    assert events[0] == (str(tmp_path / "tensorboard"), None) and events[-1] == "closed"
    losses = [(v, s) for tag, v, s in events[1:-1] if tag == "curve/train_loss"]
    assert losses == [(row[3], row[0]) for row in run.curve]
    assert sum(tag == "curve/validation_loss" for tag, *_ in events[1:-1]) == 2
    row = looked[1][6, "blocks.1.mixer.up", "dy_wgrad"]
    assert ("dy_wgrad flushed/blocks.1.mixer.up", float(row["flushed"]), 6) in events


def test_real_events_can_be_read(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(job(tensorboard=True), tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [event.value for event in found.Scalars("curve/train_loss")]
    assert losses == pytest.approx([row[3] for row in run.curve])
