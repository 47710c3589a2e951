"""The training loop on a model small enough to work out by hand, and its parts."""

import copy
import csv
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fp4repro
from fp4repro import Conversion
from fp4repro.ablations import load_ablations
from fp4repro.config import Training, load_scale
from fp4repro.data.batches import Batches
from fp4repro.data.tokens import TokenData
from fp4repro.errors import Fp4ReproError
from fp4repro.optim import adamw
from fp4repro.recipes import LateBF16
from fp4repro.report.schema import parse_rows
from fp4repro.train import outputs, provenance
from fp4repro.train.checkpoint import save_checkpoint
from fp4repro.train.evaluate import held_out, validation_loss
from fp4repro.train.job import Job, Trunk, model_of
from fp4repro.train.loop import CURVE, Run
from fp4repro.train.progress import Progress
from fp4repro.train.protocols import scale_of
from fp4repro.train.schedule import learning_rate

CPU = torch.device("cpu")
SMOKE = Path(__file__).parents[1] / "configs" / "scales" / "smoke.yaml"
SETTINGS = Training(
    tokens=128 * 40,
    batch=4,
    context=32,
    accumulate=1,
    learning_rate=1e-2,
    final_learning_rate_ratio=0.01,
    warmup_fraction=0.1,
    decay_fraction=0.2,
    decay_shape="minus-sqrt",
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    clip=1.0,
    validation_every=15,
    validation_tokens=256,
    checkpoint_every=10,
)
VOCABULARY = 64


class Bigram(nn.Module):
    """Predicts a token from the one before it; float32, untouched by autocast."""

    def __init__(self, seed=0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)
        self.head = nn.Linear(VOCABULARY, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.1, generator=generator)

    def forward(self, tokens, targets):
        with torch.autocast("cpu", enabled=False):
            logits = self.head(self.embedding(tokens))
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.fixture
def data():
    # A text in which each token is followed by the next but for some noise.
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 2, 5000) * generator.integers(0, VOCABULARY, 5000)
    tokens = ((np.arange(5000) + noise) % VOCABULARY).astype(np.uint16)
    lengths = generator.integers(0, 5, VOCABULARY)
    return TokenData(train=tokens[:4000], validation=tokens[4000:], token_bytes=lengths, checksums={})


def make(settings=SETTINGS, model=None):
    model = model or Bigram()
    s = settings
    return Run(model, adamw(model, s.learning_rate, s.betas, s.eps, s.weight_decay), settings, CPU)


def train(run, data, seed=0, after=lambda: None):
    settings = run.settings
    batches = Batches(data.train, settings.batch, settings.context, seed)
    run.train(batches, held_out(data, settings), after)
    return run


# Schedule


@pytest.mark.parametrize("shape", ["linear", "minus-sqrt"])
def test_schedule(shape):
    settings = dataclasses.replace(SETTINGS, tokens=128 * 100, decay_shape=shape)
    rates = np.array([learning_rate(step, settings) for step in range(100)])
    np.testing.assert_allclose(rates[:10], 1e-2 * np.arange(1, 11) / 10)
    assert (rates[9:80] == 1e-2).all()
    assert (np.diff(rates[79:]) < 0).all()
    np.testing.assert_allclose(rates[-1], 1e-4)
    done = np.arange(1, 21) / 20
    fallen = done if shape == "linear" else np.sqrt(done)
    np.testing.assert_allclose(rates[80:], 1e-2 - (1e-2 - 1e-4) * fallen)


def test_schedule_without_warmup_or_decay():
    settings = dataclasses.replace(SETTINGS, warmup_fraction=0.0, decay_fraction=0.0)
    assert {learning_rate(step, settings) for step in range(settings.steps)} == {1e-2}


def test_schedule_of_the_whole_run():
    settings = dataclasses.replace(SETTINGS, warmup_fraction=0.5, decay_fraction=0.5)
    rates = [learning_rate(step, settings) for step in range(settings.steps)]
    assert max(rates) == rates[19] == 1e-2
    assert math.isclose(rates[-1], 1e-4)


# Loop


def test_it_learns_and_records_each_step(data):
    run = train(make(), data)
    losses = run.column("train_loss")
    assert run.step == 40 and not run.diverged
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.1
    assert losses[-1] < losses[0] - 0.2
    assert run.column("tokens") == [128 * n for n in range(1, 41)]
    measured = [step for step, v in enumerate(run.column("validation_loss"), 1) if v is not None]
    assert measured == [15, 30, 40]
    assert run.column("learning_rate")[-1] == learning_rate(39, SETTINGS)


def test_accumulated_micro_batches_give_the_gradient_of_the_batch(data):
    whole, split = make(), make(dataclasses.replace(SETTINGS, accumulate=4))
    x, y = Batches(data.train, 4, 32, 0)[0]
    losses = [run._gradients(x, y) for run in (whole, split)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    for a, b in zip(whole.model.parameters(), split.model.parameters(), strict=True):
        assert torch.count_nonzero(a.grad) > 0
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8)


def test_the_gradient_is_clipped_to_the_norm(data):
    run = make(dataclasses.replace(SETTINGS, clip=1e-3))
    _, norm = run._gradients(*Batches(data.train, 4, 32, 0)[0])
    clipped = math.sqrt(sum(p.grad.square().sum() for p in run.model.parameters()))
    assert norm > 1e-2
    assert math.isclose(clipped, 1e-3, rel_tol=1e-3)


def test_set_step_is_told_step_and_micro_batch(data, monkeypatch):
    told = []
    monkeypatch.setattr("fp4repro.set_step", lambda model, *key: told.append(key))
    run = make(dataclasses.replace(SETTINGS, accumulate=2, tokens=128 * 3))
    train(run, data)
    assert told == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_products_run_under_bf16_autocast(data):
    seen = []

    class Watched(Bigram):
        def forward(self, tokens, targets):
            seen.append(nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype)
            return super().forward(tokens, targets)

    train(make(dataclasses.replace(SETTINGS, tokens=128), Watched()), data)
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 1 + 2  # one of training, two of validation


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(data, bad):
    class Breaking(Bigram):
        calls = 0

        def forward(self, tokens, targets):
            Breaking.calls += 1
            return super().forward(tokens, targets) * (bad if Breaking.calls == 6 else 1)

    run = make(model=Breaking())
    train(run, data)
    assert run.diverged == f"diverged: training loss is {bad} at step 6"
    assert run.step == 6 and run.finished
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_a_gradient_that_is_not_finite_ends_the_run(data):
    run = make()
    run.model.head.weight.register_hook(lambda gradient: gradient * math.nan)
    train(run, data)
    assert run.diverged == "diverged: gradient norm is nan at step 1"
    assert all(p.isfinite().all() for p in run.model.parameters())


@pytest.mark.parametrize("stop", [1, 15, 16, 39])
def test_a_restored_run_ends_with_the_same_bits(data, stop):
    unbroken = train(make(), data)
    first = make()
    states = []

    def after():
        if first.step == stop:
            states.append(copy.deepcopy(first.state()))

    train(first, data, after=after)
    second = make(model=Bigram(seed=7))
    second.restore(states[0])
    assert second.step == stop
    train(second, data)
    assert second.curve == unbroken.curve
    for a, b in zip(second.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(a, b)


# Protocols


@pytest.fixture
def protocol(job):
    """A job of the tiny model by protocol and recipe, 8 steps in all, the last two of them decaying."""
    settings = dataclasses.replace(SETTINGS, tokens=128 * 8, warmup_fraction=0.25, decay_fraction=0.25)
    plan = dataclasses.replace(job.scale.ablations, branch_from=0.5, branch_steps=2)
    scale = dataclasses.replace(job.scale, training=settings, ablations=plan)

    def make(name, recipe, trunk=None):
        taken = scale_of(scale, name)
        return dataclasses.replace(
            job, scale=taken, recipe=fp4repro.recipe(recipe), protocol=name, trunk=trunk
        )

    return make


def finish(job):
    run = job.begin()
    run.train(job.batches, held_out(job.data, run.settings), lambda: None)
    return run


def test_a_bf16_branch_is_the_run_that_its_trunk_was_going_to_be(protocol, tmp_path, eager):
    trunk_job, whole = protocol("trunk", "bf16"), finish(protocol("pretrain", "bf16"))
    trunk = finish(trunk_job)
    assert trunk.step == 4 and trunk.column("learning_rate") == whole.column("learning_rate")[:4]
    path = tmp_path / "trunk.pt"
    save_checkpoint(path, trunk_job.settings(), trunk.state())
    job = protocol("branches", "bf16", Trunk(trunk_job, path))
    assert job.first_step == 4
    branch = finish(job)
    assert branch.step == 6  # where the whole run's learning rate begins to fall
    for column in ("learning_rate", "train_loss", "gradient_norm"):
        assert branch.column(column) == whole.column(column)[:6]
    other = finish(protocol("branches", "nvfp4", Trunk(trunk_job, path)))
    losses = [run.column("train_loss") for run in (other, branch)]
    assert losses[0][:4] == losses[1][:4]
    # The first of its own losses already comes from a quantised forward pass.
    assert all(a != b for a, b in zip(losses[0][4:], losses[1][4:], strict=True))


def test_a_late_switch_changes_the_linears_at_its_step_and_is_nothing_before(protocol, eager):
    job = protocol("pretrain", "nvfp4")
    late = dataclasses.replace(job, recipe=job.recipe.replace(late_bf16=LateBF16(0.75)))
    plain, switched = finish(job), finish(late)
    for column in ("train_loss", "gradient_norm"):
        one, two = (run.column(column) for run in (plain, switched))
        assert one[:6] == two[:6] and one[6] != two[6]  # 6 of 8 steps are done
    assert [c.recipe.quantises for c in switched.phases.conversions] == [True, False]
    calls = [run.phases.calls()["dy_wgrad"] for run in (plain, switched)]
    assert calls[1] == calls[0] * 6 // 8


def test_tokens_and_model_of_an_entry():
    scale = load_scale(SMOKE)
    entries = load_ablations()
    longer = scale_of(scale, "ablations", entries["mxfp4_136"])
    assert longer.training.steps == round(1.36 * 40) and longer.model == "tiny"
    other = scale_of(scale, "ablations", entries["trend_short"])
    assert other.model == "llama-tiny"
    blocks = 3 * (4 * 64 * 64 + 2 * 64 * 192)  # q, k, v, o and the feed-forward's two, all of 64 and 192
    assert scale.ablations.token_share == 0.01
    assert other.training.steps == round(0.01 * 6 * blocks / 1024)
    whole = dataclasses.replace(scale, ablations=dataclasses.replace(scale.ablations, token_share=1.0))
    assert scale_of(whole, "ablations", entries["trend_mid"]).training.steps == round(25 * blocks / 1024)
    assert scale_of(scale, "ablations", entries["no_sr"]) == scale


# Evaluation


def test_validation_loss_and_bits_per_byte_by_brute_force(data):
    held = held_out(data, SETTINGS)
    model = Bigram()
    loss = validation_loss(model, held, 3, CPU)  # pieces of 3, 3 and 2 windows
    stride = (len(data.validation) - 1) // 8
    weights = (model.embedding.weight @ model.head.weight.T).double()
    nats, nbytes = 0.0, 0
    for window in range(8):
        for place in range(window * stride, window * stride + 32):
            token, target = int(data.validation[place]), int(data.validation[place + 1])
            nats -= torch.log_softmax(weights[token], 0)[target].item()
            nbytes += int(data.token_bytes[target])
    assert math.isclose(loss, nats / 256, rel_tol=1e-6)
    assert held.nbytes == nbytes
    assert math.isclose(held.bits_per_byte(loss), nats / math.log(2) / nbytes, rel_tol=1e-6)
    assert model.training


# Outputs


@pytest.fixture
def job(data):
    scale = dataclasses.replace(load_scale(SMOKE), training=SETTINGS)
    return Job(scale, model_of(scale), fp4repro.recipe("nvfp4"), 3, data, CPU)


def written(job, run, out):
    """The rows of the run's metrics, by metric."""
    conversion = Conversion(job.recipe, swapped={"head": (VOCABULARY, VOCABULARY)})
    sessions = [{"from_step": 0, "commit": "abc"}]
    outputs.write_outputs(out, job, run, conversion, held_out(job.data, SETTINGS), sessions)
    return {row.metric: row for row in parse_rows(out / "metrics.csv")}


def test_the_files_of_a_run(job, data, tmp_path):
    run = train(make(), data)
    rows = written(job, run, tmp_path)
    validation = run.column("validation_loss")[-1]
    assert rows["validation_loss"].value == validation
    assert rows["bits_per_byte"].value == held_out(data, SETTINGS).bits_per_byte(validation)
    assert math.isclose(rows["train_loss"].value, np.mean(run.column("train_loss")[-4:]))
    assert rows["tokens"].value == 128 * 40
    assert rows["parameters"].value == 2 * VOCABULARY**2
    assert rows["linears_quantised"].value == 1
    assert rows["share_of_linear_flops_quantised"].value == 1
    assert rows["diverged"].value == 0
    # Two matrices with two moments in FP32, and two counters of steps.
    assert rows["optimizer_state_bytes"].value == 2 * 2 * 4 * VOCABULARY**2 + 2 * 4
    # What the loss keeps: 128 tokens and targets, and for each token probabilities and hidden values.
    assert 2 * 4 * 128 * VOCABULARY <= rows["saved_activation_bytes"].value < 4 * 4 * 128 * VOCABULARY
    assert rows["saved_activation_bytes"].note == "4 x 32 tokens"
    shared = {(r.experiment, r.setting, r.n, r.provenance, r.commit) for r in rows.values()}
    assert shared == {("pretrain", "nvfp4/seed-3", 1, "measured", "abc")}
    with open(tmp_path / "curve.csv", newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == CURVE and len(lines) == 40
    assert [float(line[3]) for line in lines] == run.column("train_loss")
    assert lines[0][5] == "" and float(lines[-1][5]) == validation
    assert (tmp_path / "layers.csv").read_text().splitlines() == [
        "name,precision,in,out,reason",
        f"head,nvfp4,{VOCABULARY},{VOCABULARY},",
    ]
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["head.weight"], run.model.head.weight)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["settings"]["seed"] == 3 and about["scale_file"]["model"] == "tiny"


def test_a_diverged_run_has_rows_that_say_so(job, data, tmp_path):
    run = make()
    run.model.head.weight.register_hook(lambda gradient: gradient * math.nan)
    rows = written(job, train(run, data), tmp_path)
    assert rows["diverged"].value == 1
    for metric in ("validation_loss", "bits_per_byte", "train_loss"):
        assert rows[metric].value is None
        assert rows[metric].note == "diverged: gradient norm is nan at step 1"
    assert rows["tokens"].value == 128


def test_the_share_of_quantised_linears(data):
    layers = [("a", "nvfp4", 10, 30, ""), ("b", "bf16", 10, 10, "last blocks")]
    run = make()
    run.curve = [[1, 128, 1.0, 1.0, 1.0, 1.0]]
    where = dict(experiment="pretrain", setting="s/seed-0", scale="", device="", torch="", commit="")
    found = outputs.metric_rows(run, held_out(data, SETTINGS), layers, {}, where)
    rows = {row.metric: row for row in found}
    assert rows["share_of_linear_flops_quantised"].value == 0.75
    assert (rows["linears_quantised"].value, rows["linears_quantised"].note) == (1, "of 2")


def test_a_job_begins_the_same_for_every_recipe(job):
    jobs = [dataclasses.replace(job, recipe=fp4repro.recipe(name)) for name in ("bf16", "nvfp4")]
    plain, quantised = (job.begin().model for job in jobs)
    assert plain.state_dict().keys() == quantised.state_dict().keys()
    for a, b in zip(plain.parameters(), quantised.parameters(), strict=True):
        assert torch.equal(a, b)
    other = dataclasses.replace(job, seed=4).begin().model
    assert not torch.equal(other.head.weight, plain.head.weight)
    changed = {k for k, v in jobs[0].settings().items() if v != jobs[1].settings()[k]}
    assert changed == {"recipe", "recipe.fields"}


# Progress and provenance


def test_progress_without_a_terminal_is_a_line_each_tenth(capsys):
    progress = Progress("bf16/seed-0", 5, 40, 128, None)
    for step in range(6, 41):
        progress.update(step, 3.0)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f"bf16/seed-0: step {step}/40" for step in range(8, 41, 4)
    ]
    assert all("loss 3.0000" in line and "tokens/s" in line and "left" in line for line in lines)


def test_devices():
    assert provenance.choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert provenance.choose_device("auto") == CPU
        with pytest.raises(Fp4ReproError, match="asks for device cuda and torch finds none"):
            provenance.choose_device("cuda")
    assert provenance.device_name(CPU).startswith("CPU ")


def test_commit_of_a_changed_tree(tmp_path, monkeypatch):
    answers = {"rev-parse": "abcdef123456\n", "status": ""}
    monkeypatch.setattr(provenance, "_git", lambda command, *rest: answers[command])
    assert provenance.commit() == "abcdef123456"
    answers["status"] = " M fp4repro/config.py\n"
    assert provenance.commit() == "abcdef123456-dirty"
    answers["rev-parse"] = None
    assert provenance.commit() == "unknown"
