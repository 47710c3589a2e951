"""Trainable factors of LoRA-SVD, and runs with a side path that are stopped and go on."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_train import CPU, SETTINGS, VOCABULARY
from torch import nn

import fp4repro
from fp4repro import Fp4ReproError, KeepBF16
from fp4repro.data.batches import Batches
from fp4repro.data.tokens import TokenData
from fp4repro.layers import carried_state, follow_splits, restore_carried_state
from fp4repro.layers.lora_factors import FACTORS, LoraFactorLinear
from fp4repro.optim import adamw
from fp4repro.recipes import LoraSVD
from fp4repro.train.checkpoint import load_checkpoint, save_checkpoint
from fp4repro.train.evaluate import held_out
from fp4repro.train.loop import Run

pytestmark = pytest.mark.usefixtures("eager")
BASE = fp4repro.recipe("nvfp4").replace(keep=KeepBF16())
TRAINED = LoraSVD(rank=4, every=5, trainable_factors=True)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.2, generator=generator)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def linear(settings, step=0):
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=False)
    fp4repro.convert(layer, BASE.replace(lora_svd=settings))
    fp4repro.set_step(layer, step)
    return layer


X = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).bfloat16().float()
DY = torch.randn(128, 48, generator=torch.Generator().manual_seed(2)).bfloat16().float()


def error(got, want):
    return ((got - want).norm() / want.norm()).item()


def test_the_first_step_is_that_of_the_fixed_basis():
    fixed, trained = linear(replace(TRAINED, trainable_factors=False)), linear(TRAINED)
    assert error(trained(X), fixed(X)) < 2**-8  # but for one rounding to BF16
    assert torch.equal(trained.weight, fixed.matrix())
    trained(X).backward(DY)
    inner = X @ trained.factor_b.detach()
    assert error(trained.factor_a.grad, DY.T @ inner) < 0.01
    assert error(trained.factor_b.grad, X.T @ (DY @ trained.factor_a.detach())) < 0.01
    assert 0.1 < error(trained.weight.grad, DY.T @ X) < 0.2  # the residual's is the base recipe's


def test_a_split_merges_what_was_trained():
    layer = linear(TRAINED)
    layer(X)
    with torch.no_grad():
        for name in ("weight", *FACTORS):
            parameter = getattr(layer, name)
            parameter.add_(0.1 * torch.randn_like(parameter))
    w = layer.merged()
    a = layer.factor_a.detach().clone()
    fp4repro.set_step(layer, 4)
    layer(X)
    assert torch.equal(layer.factor_a, a)  # not before its step
    fp4repro.set_step(layer, 5)
    layer(X)
    assert not torch.equal(layer.factor_a, a)
    assert error(layer.merged(), w) < 1e-6
    gram = layer.factor_b.T @ layer.factor_b
    assert (gram - torch.eye(4)).abs().max() < 0.01
    captured = ((w @ layer.factor_b).norm() / w.norm()).item()
    assert captured == pytest.approx((torch.linalg.svdvals(w)[:4].norm() / w.norm()).item(), rel=0.02)


def test_files_hold_w_and_other_recipes_get_it():
    plain = nn.Linear(64, 48, bias=False)
    layer = linear(TRAINED)
    w = layer.weight.detach().clone()
    assert torch.equal(layer.state_dict()["weight"], w)  # before the first split
    layer(X)
    assert error(layer.weight, w) > 0.1 and list(layer.state_dict()) == ["weight"]
    plain.load_state_dict(layer.state_dict())
    assert error(plain.weight, w) < 1e-6
    other = linear(TRAINED)
    with torch.no_grad():
        other.weight.zero_()
    other.load_state_dict(layer.state_dict())
    assert error(other(X), layer(X)) < 0.01
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(X), layer(X)) and twin.factor_a is not layer.factor_a
    fp4repro.convert(layer, fp4repro.recipe("bf16"))
    assert type(layer) is nn.Linear and [n for n, _ in layer.named_parameters()] == ["weight"]
    assert error(layer.weight, w) < 1e-6


def test_tied_weights_are_refused():
    model = Language()
    model.blocks[1].weight = model.blocks[0].weight
    with pytest.raises(Fp4ReproError, match=r"layer blocks\.0: its weight is tied to another's"):
        fp4repro.convert(model, BASE.replace(lora_svd=TRAINED))


@pytest.mark.parametrize("rule", ["reset", "keep"])
def test_what_the_optimizer_knows_of_the_factors(rule):
    layer = linear(replace(TRAINED, factor_states=rule))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    follow_splits(layer, optimizer)
    counts = []
    for step in range(7):
        fp4repro.set_step(layer, step)
        optimizer.zero_grad()
        layer(X).square().sum().backward()
        optimizer.step()
        counts.append([int(optimizer.state[getattr(layer, n)]["step"]) for n in ("weight", "factor_a")])
    assert [w for w, _ in counts] == [1, 2, 3, 4, 5, 6, 7]  # the residual's moments stay
    assert [a for _, a in counts] == ([1, 2, 3, 4, 5, 1, 2] if rule == "reset" else [1, 2, 3, 4, 5, 6, 7])


# Runs that are stopped


def run_of(settings):
    model = Language()
    fp4repro.convert(model, BASE.replace(lora_svd=settings))
    s = SETTINGS
    optimizer = adamw(model, s.learning_rate, s.betas, s.eps, s.weight_decay)
    follow_splits(model, optimizer)
    return Run(model, optimizer, replace(SETTINGS, tokens=128 * 12), CPU)


@pytest.fixture
def data():
    tokens = (np.arange(5000) * 7 % 61 % VOCABULARY).astype(np.uint16)
    return TokenData(tokens[:4000], tokens[4000:], np.ones(VOCABULARY, np.int64), {})


def finish(run, data, after=lambda: None):
    batches = Batches(data.train, run.settings.batch, run.settings.context, 0)
    run.train(batches, held_out(data, run.settings), after)
    return run


@pytest.mark.parametrize("settings", [LoraSVD(rank=4, every=5), LoraSVD(4, 5, protect_wgrad=True), TRAINED])
def test_a_stopped_run_goes_on_bit_for_bit(settings, data, tmp_path):
    """Stopped between two refreshes; without what the layers carry it would not."""
    path = tmp_path / "checkpoint.pt"
    whole = run_of(settings)
    states = []

    def keep():
        if whole.step == 8:
            save_checkpoint(path, {}, whole.state())
            states.append(copy.deepcopy(whole.state()["layers"]))

    finish(whole, data, keep)
    resumed = run_of(settings)
    resumed.restore(load_checkpoint(path, {}))
    assert resumed.step == 8
    held = {name: dict(layer) for name, layer in carried_state(resumed.model).items()}
    for name, layer in states[0].items():
        assert all(torch.equal(torch.as_tensor(layer[k]), torch.as_tensor(held[name][k])) for k in layer)
    finish(resumed, data)
    assert resumed.curve == whole.curve and len(whole.curve) == 12
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)

    forgetful = run_of(settings)
    forgetful.restore(load_checkpoint(path, {}) | {"layers": {}})
    assert finish(forgetful, data).curve[8:] != whole.curve[8:]


def test_a_model_without_a_side_path_carries_nothing():
    model = Language()
    fp4repro.convert(model, BASE)
    assert carried_state(model) == {}
    restore_carried_state(model, {})
    optimizer = torch.optim.AdamW(model.parameters())
    follow_splits(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    fp4repro.convert(model, BASE.replace(lora_svd=TRAINED))
    assert all(type(block) is LoraFactorLinear for block in model.blocks)
