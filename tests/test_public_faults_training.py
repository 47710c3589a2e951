"""Faults reported in public around NVFP4, each as a test named after its entry: rounding state, training.

Sections B (stochastic rounding and random state), E2 and F (training state), and those of A that need
a layer. B6's resumed run is test_checkpoint.py's; test_public_faults.py lists what has no test.
"""

from collections import Counter
from dataclasses import replace

import cases
import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

import fp4repro
from fp4repro import NVFP4, KeepBF16, RandomKey, fake_quantize, quantize
from fp4repro.core import quantize as quantizing
from fp4repro.layers.operands import Slot
from fp4repro.recipes import SLOTS

pytestmark = pytest.mark.usefixtures("eager")
TOKENS, IN, OUT = 256, 64, 96
RECIPE = fp4repro.recipe("nvfp4").replace(keep=KeepBF16())


def normal(*shape, seed=0, scale=1.0):
    return torch.from_numpy(cases.normal(seed, shape, scale))


def linear(recipe=RECIPE, seed=0):
    layer = nn.Linear(IN, OUT, bias=False)
    with torch.no_grad():
        layer.weight.copy_(normal(OUT, IN, seed=11, scale=0.1))
    report = fp4repro.convert(layer, recipe, seed)
    fp4repro.set_step(layer, 0)
    return layer, report


def gradients(layer, x, dy):
    """Input and weight gradient of one use."""
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    layer(x).backward(dy)
    return x.grad, layer.weight.grad


def mlp(width=64, blocks=3):
    torch.manual_seed(0)
    entries = [nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))]
    entries += [nn.Sequential(nn.Linear(width, width)) for _ in range(blocks - 1)]
    return nn.Sequential(*entries)


class Spy:
    """Every random stream and every operand that a pass asks for, with its slot's name."""

    def __init__(self, monkeypatch):
        self.keys, self.roundings = [], []
        noise, operand, store = quantizing._noise, Slot.operand, Slot.store

        def noted_noise(x, key, bits):
            self.keys.append(key)
            return noise(x, key, bits)

        def noted(function):
            def call(slot, x, key, watch):
                drawn = len(self.keys)
                out = function(slot, x, key, watch)
                self.roundings.append((slot.name, len(self.keys) - drawn))
                return out

            return call

        monkeypatch.setattr(quantizing, "_noise", noted_noise)
        monkeypatch.setattr(Slot, "operand", noted(operand))
        monkeypatch.setattr(Slot, "store", noted(store))


def test_A3_zero_operands_of_a_linear_layer():
    x, dy = normal(TOKENS, IN), normal(TOKENS, OUT, seed=1, scale=1e-3)
    layer, _ = linear()
    for zero in ("x", "dy", "w", "expert without tokens"):
        layer, _ = linear()
        a, b = (x * (zero != "x")), (dy * (zero != "dy"))
        if zero == "w":
            layer.weight.data.zero_()
        if zero.startswith("expert"):
            a, b = a[:0], b[:0]
        y = layer(a)
        dx, dw = gradients(layer, a, b)
        assert y.isfinite().all() and dx.isfinite().all() and dw.isfinite().all()
        assert not y.any() or zero == "dy"
        assert not dx.any() or zero == "x"
        assert (not dw.any()) == (zero != "w") and dw is not None


def test_A11_a_nan_ends_the_run_and_is_not_hidden():
    """Poisoned as a whole in every product it enters, so that the loss of that step shows it."""
    model = mlp()
    fp4repro.convert(model, RECIPE)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    losses = []
    for step in range(5):
        fp4repro.set_step(model, step)
        x = normal(128, 64, seed=step)
        if step == 3:
            x[77, 5] = torch.nan
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        losses.append((loss.isfinite().item(), norm.isfinite().item()))
        optimizer.step()
    assert losses[:3] == [(True, True)] * 3 and losses[3] == (False, False)


def test_B1_gradients_are_not_zero_and_point_the_right_way():
    x, dy = normal(1024, IN), normal(1024, OUT, seed=1, scale=1e-4)
    layer, _ = linear()
    dx, dw = gradients(layer, x, dy)
    for got, exact, low, high in ((dx, dy @ layer.weight, 0.15, 0.20), (dw, dy.T @ x, 0.155, 0.18)):
        assert (got != 0).float().mean() > 0.99
        assert 0.97 < cosine_similarity(got.flatten(), exact.flatten(), 0) < 0.99
        assert low < ((got - exact).norm() / exact.norm()).item() < high
        assert 0.97 < (got.norm() / exact.norm()).item() < 1.04


@pytest.mark.parametrize("signs", ["te", "none", "drawn"])
def test_C1_both_operands_of_wgrad_share_their_signs(signs):
    """Also where they are drawn: from the product's key, which the slots of both operands know."""
    x, dy = normal(1024, IN), normal(1024, OUT, seed=1)
    layer, _ = linear(RECIPE.replace(hadamard_signs=signs))
    _, dw = gradients(layer, x, dy)
    assert cosine_similarity(dw.flatten(), (dy.T @ x).flatten(), 0) > 0.97


def rounding_outcomes(key):
    """4,096 x 64 elements of scaled value 0.25, rounded to 0 or 0.5: which went up."""
    x = torch.full((4096, 64), 0.25)
    x[:, ::16] = 6
    x[0, 0] = 2688
    x[0, 1:16] = 0
    up = fake_quantize(x, NVFP4, "stochastic", key) > 0.3
    return up[1:].view(-1, 16)[:, 1:].flatten().double()


def test_B2_streams_of_copies_steps_layers_and_microbatches_are_uncorrelated():
    base = RandomKey(1, 2, 3, 4)
    others = {
        "copy": RandomKey(1, 2, 3, SLOTS.index("dy_wgrad") + 1),
        "step": RandomKey(1, 3, 3, 4),
        "layer": RandomKey(1, 2, 4, 4),
        "seed": RandomKey(2, 2, 3, 4),
        "microbatch": RandomKey(1, 2, 3, 4, microbatch=1),
        "rank": RandomKey(1, 2, 3, 4, rank=1),
    }
    first = rounding_outcomes(base)
    n = len(first)
    assert abs(first.mean() - 0.5) < 4 * 0.5 / n**0.5
    for name, key in others.items():
        second = rounding_outcomes(key)
        assert abs(second.mean() - 0.5) < 4 * 0.5 / n**0.5, name
        correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
        assert abs(correlation) < 4 / n**0.5, name


def test_B2_a_real_pass_uses_every_stream_once(monkeypatch):
    model = mlp()
    fp4repro.convert(model, RECIPE)
    spy = Spy(monkeypatch)
    for step in range(2):
        for microbatch in range(2):
            fp4repro.set_step(model, step, microbatch)
            model(normal(128, 64, seed=step).requires_grad_()).square().mean().backward()
    layers = sum(isinstance(m, fp4repro.QuantLinear) for m in model.modules())
    assert len(spy.keys) == 2 * 2 * layers * 2  # steps, microbatches, layers, copies of dy
    # Apart from the data's share in the key, which would hide a part that is missing.
    assert len({replace(key, salt=0).words() for key in spy.keys}) == len(spy.keys)


def test_B3_the_same_tensor_is_rounded_anew_at_every_step():
    x = normal(16, 64)
    draws = [quantize(x, NVFP4, "stochastic", RandomKey(0, step)) for step in range(512)]
    assert len({bytes(q.codes.numpy()) for q in draws}) == 512
    q = quantize(x, NVFP4)
    step = q.scales.float().repeat_interleave(16, 1) * q.tensor_scale
    mean = torch.stack([d.dequantize() for d in draws]).mean(0)
    inside = (x / step).abs() <= 6
    spacing = step * torch.where((x / step).abs() < 2, 0.5, torch.where((x / step).abs() < 4, 1.0, 2.0))
    off = ((mean - x) / spacing)[inside]  # in steps; a draw's deviation is at most half
    assert (off * x.sign()[inside] > -5 * 0.5 / 512**0.5 - 1 / 256).all()
    assert (off.abs() < 5 * 0.5 / 512**0.5 + 1 / 256).all()
    assert 0.3 < off.std() * 512**0.5 < 0.5


def test_B4_stochastic_rounding_of_dy_alone_and_switched_by_the_recipe(monkeypatch):
    x, dy = normal(TOKENS, IN), normal(TOKENS, OUT, seed=1)
    for stochastic in (RECIPE.stochastic, (), ("dy_dgrad",), ("dy_wgrad",)):
        with monkeypatch.context() as patch:
            layer, _ = linear(RECIPE.replace(stochastic=stochastic))
            spy = Spy(patch)
            gradients(layer, x, dy)
        draws = dict(spy.roundings)
        assert len(spy.roundings) == 5  # the weight once for both its uses
        assert {name for name, drawn in draws.items() if drawn} == set(stochastic)
        assert set(draws) == {"x_fprop", "w_fprop", "x_wgrad", "dy_dgrad", "dy_wgrad"}
        assert all(drawn <= 1 for drawn in draws.values())


def test_B5_clipped_elements_are_biased_and_no_others():
    x = normal(32, 64)
    q = quantize(x, NVFP4)
    step = q.scales.float().repeat_interleave(16, 1) * q.tensor_scale
    ratio = (x / step).abs()
    draws = [fake_quantize(x, NVFP4, "stochastic", RandomKey(0, i)) for i in range(1024)]
    mean = torch.stack(draws).mean(0)
    clipped = ratio > 6
    assert 0.02 < clipped.float().mean() < 0.05
    assert torch.allclose(mean[clipped].abs(), (6 * step)[clipped])  # all draws alike
    off = ((mean - x) * x.sign() / step)[~clipped]
    spacing = torch.where(ratio < 2, 0.5, torch.where(ratio < 4, 1.0, 2.0))[~clipped]
    assert (off < 5 * 0.5 * spacing / 32).all() and (off > -5 * 0.5 * spacing / 32 - spacing / 256).all()


def test_B6_a_pass_is_repeated_by_its_step_and_nothing_else():
    x, dy = normal(TOKENS, IN), normal(TOKENS, OUT, seed=1)
    layer, _ = linear(seed=3)
    fp4repro.set_step(layer, 5)
    first = gradients(layer, x, dy)
    fp4repro.set_step(layer, 6)
    between = gradients(layer, x, dy)
    torch.manual_seed(123)
    other, _ = linear(seed=3)  # another process would make it anew
    fp4repro.set_step(other, 5)
    for a, b, c in zip(first, gradients(other, x, dy), between, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_B7_a_compiled_step_draws_new_bits_each_time():
    x, dy = normal(TOKENS, IN), normal(TOKENS, OUT, seed=1)
    layer, _ = linear()
    whole = torch.compile(lambda x: layer(x), backend="eager")
    seen = []
    for step in range(5):
        fp4repro.set_step(layer, step)
        plain = gradients(layer, x, dy)
        a = x.clone().requires_grad_()
        layer.weight.grad = None
        whole(a).backward(dy)
        assert torch.equal(a.grad, plain[0]) and torch.equal(layer.weight.grad, plain[1])
        seen.append(layer.weight.grad.clone())
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_E2_what_ran_is_counted():
    model = nn.Sequential(mlp(blocks=3), nn.Linear(64, 8))
    report = fp4repro.convert(model, RECIPE)
    assert list(report.kept) == ["1"] and len(report.swapped) == 4
    for step in range(2):
        fp4repro.set_step(model, step)
        model(normal(128, 64).requires_grad_()).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(1e-3 * p.grad)
    expected = {"x_fprop": 8, "w_fprop": 8, "x_wgrad": 8, "dy_dgrad": 8, "dy_wgrad": 8}
    assert report.calls() == expected
    with pytest.raises(fp4repro.Fp4ReproError, match="no recipe is named"):
        fp4repro.recipe("nvpf4")


WRITES = {
    "whole": lambda w: w.data.mul_(2),
    "one element, in place": lambda w: w[0, 1].add_(10),
    "one element, through .data": lambda w: w.data[0, 1].add_(10),
    "one row, through .data": lambda w: w.data[5].mul_(-1),
    "through numpy": lambda w: w.detach().numpy().__setitem__((3, 3), 10),
}


@pytest.mark.parametrize("write", WRITES)
def test_F2_a_changed_weight_is_quantised_anew(write):
    layer, report = linear()
    x = normal(32, IN)
    before = layer(x)
    assert torch.equal(layer(x), before) and report.calls()["w_fprop"] == 1
    with torch.no_grad():
        WRITES[write](layer.weight)
    fresh, _ = linear()
    fresh.weight.data.copy_(layer.weight.detach())
    assert not torch.equal(layer(x), before)
    assert torch.equal(layer(x), fresh(x))


def test_F3_accumulated_gradients_are_the_sum():
    x, dy = normal(8, 128, IN), normal(8, 128, OUT, seed=1)
    layer, _ = linear()
    parts = []
    for i in range(8):
        fp4repro.set_step(layer, 0, microbatch=i)
        parts.append(gradients(layer, x[i], dy[i])[1].clone())
    layer.weight.grad = None
    for i in range(8):
        fp4repro.set_step(layer, 0, microbatch=i)
        layer(x[i]).backward(dy[i])
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(layer.weight.grad, total)
    assert len({bytes(p.numpy()) for p in parts}) == 8


def test_F3_a_layer_used_twice_keeps_both_gradients_and_draws_twice(monkeypatch):
    """The second use in one forward must not round with the first one's bits."""
    layer, _ = linear()
    x, y = normal(128, IN), normal(128, IN, seed=5)
    dy = normal(128, OUT, seed=1)
    parts = [gradients(layer, a, dy)[1].clone() for a in (x, y)]
    layer.weight.grad = None
    spy = Spy(monkeypatch)
    ((layer(x) + layer(y)) * dy).sum().backward()
    exact = dy.T @ (x + y)
    got = layer.weight.grad
    assert ((got - exact).norm() / exact.norm()).item() < 0.25
    assert ((got - parts[0] - parts[1]).norm() / exact.norm()).item() < 0.25
    assert len(spy.keys) == 2
    words = Counter(key.words() for key in spy.keys)
    assert max(words.values()) == 1, "both uses drew the same random bits"


def test_F5_the_layers_in_bf16_are_named_and_counted():
    model = mlp(blocks=10)
    recipe = RECIPE.replace(keep=KeepBF16(first=1, last=2))
    report = fp4repro.convert(model, recipe)
    assert {name.split(".")[0] for name in report.kept} == {"0", "8", "9"}
    assert {name.split(".")[0] for name in report.swapped} == {str(i) for i in range(1, 8)}
    assert all("kept by the recipe" in why for why in report.kept.values())
    model(normal(128, 64)).sum().backward()
    assert report.calls()["w_fprop"] == 7
    healed = fp4repro.convert(model, fp4repro.recipe("bf16"))
    model(normal(128, 64)).sum().backward()
    assert report.calls()["w_fprop"] == 7 and healed.calls() == {}


def test_F6_the_layer_equals_its_packed_operands():
    """Forward through QuantizedTensor and matmul gives what the layer gives."""
    layer, _ = linear()
    x = normal(TOKENS, IN)
    a, w = quantize(x, NVFP4), quantize(layer.weight.detach(), NVFP4.with_block(16, 16))
    assert torch.equal(layer(x).detach(), fp4repro.matmul(a, w))
