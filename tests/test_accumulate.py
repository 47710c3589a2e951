"""Sums in groups of 64, rounded towards zero: against exact fractions, and apart from FP32's."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import fp4repro
from fp4repro import MXFP4, MXFP8, NVFP4, Fp4ReproError, RandomKey, convert, quantize, set_step
from fp4repro.core import accumulate
from fp4repro.core.accumulate import add_toward_zero, grouped_product

torch.set_num_threads(1)


def to_fp32(x: Fraction, rounding) -> Fraction:
    """The FP32 number (subnormals included, no overflow) that `rounding` picks for a fraction."""
    if x == 0:
        return x
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return rounding(x / step) * step


def by_fractions(a: np.ndarray, b: np.ndarray, scale: Fraction) -> np.ndarray:
    """a (M, K) @ b (N, K).T as the model says, one output at a time; `round` ties to even."""
    out = np.empty((len(a), len(b)), np.float32)
    for i, row in enumerate(a.tolist()):
        for j, column in enumerate(b.tolist()):
            products = [Fraction(p) * Fraction(q) for p, q in zip(row, column, strict=True)]
            total = Fraction(0)
            for k in range(0, len(products), 64):
                group = to_fp32(sum(products[k : k + 64]), round)
                total = to_fp32(total + group, math.trunc)
            out[i, j] = float(to_fp32(total * scale, round))
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def wide(*shape: int, seed: int) -> torch.Tensor:
    """Normal values, 16x16 tiles of them over eleven binades. Where all tiles are of one size, block
    scales have no small bits, FP32 sums are exact, and all ways of summing agree to the bit."""
    g = np.random.default_rng(seed)
    tiles = 2.0 ** g.integers(-8, 3, (-(-shape[0] // 16), shape[1] // 16))
    values = g.standard_normal(shape) * tiles.repeat(16, 0).repeat(16, 1)[: shape[0]]
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("k", [16, 64, 160, 448])
def test_equals_exact_fractions(k, eager):
    a = quantize(wide(5, k, seed=k), NVFP4)
    b = quantize(wide(16, k, seed=k + 1), NVFP4.with_block(16, 16))
    got = fp4repro.matmul(a, b, torch.float32, accumulate="blackwell")
    scale = Fraction((a.tensor_scale * b.tensor_scale).item())
    want = by_fractions(a.operand().float().numpy(), b.operand().float().numpy(), scale)
    assert np.count_nonzero(want) > want.size / 2
    assert np.array_equal(got.numpy().view(np.int32), want.view(np.int32))


def test_addition_towards_zero_over_all_distances(eager):
    """Exponents up to 250 apart, either sign, equal and neighbouring numbers, powers of two."""
    g = np.random.default_rng(0)
    a = g.standard_normal(3000) * 2.0 ** g.integers(-120, 120, 3000).astype(float)
    b = a * g.choice([-1, 1], 3000) * 2.0 ** g.integers(-30, 30, 3000).astype(float)
    b = b * (1 + g.integers(-2, 3, 3000) * 2.0**-23)
    a, b = a[np.abs(b) < 2.0**126], b[np.abs(b) < 2.0**126]
    edge = np.array([1, -1, 2.0**24, 2.0**-149, -(2.0**-149), 2.0**-126, 0, 1 - 2.0**-24, 2.0**100])
    a = np.concatenate([a, np.repeat(edge, len(edge))]).astype(np.float32)
    b = np.concatenate([b, np.tile(edge, len(edge))]).astype(np.float32)
    got = add_toward_zero(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    exact = [Fraction(p) + Fraction(q) for p, q in zip(a.tolist(), b.tolist(), strict=True)]
    want = [float(to_fp32(x, math.trunc)) for x in exact]
    assert np.array_equal(got, np.array(want, np.float32))
    nearest = a + b
    assert 0.4 < np.mean(got != nearest) < 0.5  # half of the inexact ones, which most are
    assert np.all(np.abs(got) <= np.abs(nearest))


def groups(*values: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """One row and one column whose groups each hold one product of two BF16 numbers."""
    a, b = torch.zeros(1, 64 * len(values)), torch.zeros(64 * len(values), 1)
    for i, (p, q) in enumerate(values):
        a[0, 64 * i + 5], b[64 * i + 5, 0] = p, q
    return a.bfloat16(), b.bfloat16()


def test_a_small_group_of_the_other_sign_takes_a_step_off(eager):
    """2**24 - 2**-20 is 2**24 to FP32 addition; towards zero it is the number before."""
    a, b = groups((4096.0, 4096.0), (-(2.0**-10), 2.0**-10))
    assert grouped_product(a, b).item() == 2.0**24 - 1
    assert (a.float() @ b.float()).item() == 2.0**24
    a, b = groups((4096.0, 4096.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))  # each lost, in either sign
    assert grouped_product(a, b).item() == 2.0**24
    assert grouped_product(-a, b).item() == -(2.0**24)


def test_groups_are_of_64_and_are_summed_whole(eager):
    """2**24 and three ones: within one group the sum is exact before its one rounding to nearest."""
    a, b = torch.zeros(1, 128), torch.ones(128, 1)
    a[0, 0], a[0, 61:64] = 2.0**24, 1.0
    assert grouped_product(a, b).item() == 2.0**24 + 4  # tie, to even
    a[0, 61:64], a[0, 64:67] = 0.0, 1.0
    assert grouped_product(a, b).item() == 2.0**24 + 2  # the next group's three, cut


def test_order_of_groups_matters(eager):
    one, big = (1.0, 1.0), (4096.0, 4096.0)
    assert grouped_product(*groups(one, one, big)).item() == 2.0**24 + 2
    assert grouped_product(*groups(big, one, one)).item() == 2.0**24


def test_loses_magnitude_where_fp32_does_not(eager):
    a, b = (quantize(wide(48, 4096, seed=s).abs(), NVFP4) for s in (1, 2))
    exact = (a.operand().double() @ b.operand().double().T) * (a.tensor_scale * b.tensor_scale).double()
    bias = {
        way: ((fp4repro.matmul(a, b, torch.float32, way).double() - exact) / exact).mean().item()
        for way in ("fp32", "blackwell")
    }
    # 64 additions, each losing half an ulp of a growing sum where there are bits to lose
    assert -4e-6 < bias["blackwell"] < -1e-7
    assert abs(bias["fp32"]) < 0.1 * abs(bias["blackwell"])


def test_agrees_with_fp32_where_fp32_is_exact(eager):
    """Gaussian data: scales between 64 and 448 are multiples of 8, sums of 256 products fit 24 bits."""
    g = torch.Generator().manual_seed(0)
    a, b = (quantize(torch.randn(32, 256, generator=g), NVFP4) for _ in range(2))
    ways = [fp4repro.matmul(a, b, accumulate=way) for way in ("fp32", "blackwell")]
    assert torch.equal(bits(ways[0]), bits(ways[1])) and ways[0].count_nonzero() == ways[0].numel()


def test_tiles_of_the_output_change_nothing(eager, monkeypatch):
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 200, generator=g).bfloat16(), torch.randn(24, 200, generator=g).bfloat16().T
    whole = grouped_product(a, b)
    monkeypatch.setattr(accumulate, "_CPU_TILE", 7)
    assert torch.equal(bits(grouped_product(a, b)), bits(whole))


def test_compiled_and_eager_give_the_same_bits(monkeypatch):
    """Odd shapes too, which one compilation serves."""
    g = np.random.default_rng(4)
    for shape in ((3, 130, 5), (16, 64, 16), (1, 320, 1)):
        a, b = (g.standard_normal(s) * 2.0 ** g.integers(-9, 9, s) for s in (shape[:2], shape[1:]))
        a, b = torch.from_numpy(a).bfloat16(), torch.from_numpy(b).bfloat16()
        compiled = grouped_product(a, b)
        with monkeypatch.context() as patch:
            patch.setattr(accumulate, "compiled", lambda make: make())
            eager = grouped_product(a, b)
        assert torch.equal(bits(compiled), bits(eager)) and eager.count_nonzero() == eager.numel()


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
def test_a_layer_sums_each_product_that_way(product, eager):
    x, dy, w = wide(128, 256, seed=1), wide(128, 192, seed=2), wide(192, 256, seed=3)
    results = {}
    for way in ("fp32", "blackwell"):
        layer = nn.Linear(256, 192, bias=False)
        layer.weight.data.copy_(w)
        changes = {"accumulate": way, "wgrad_dtype": "fp32", "keep": fp4repro.KeepBF16()}
        convert(layer, fp4repro.recipe("nvfp4").replace(**changes), seed=1)
        set_step(layer, 0)
        results[way] = run(layer, x, dy, product)
        plan = layer.plan
        key = plan.key if product == "fprop" else plan.backward_key(plan.store("x_wgrad", x, plan.key))
    operands = {"fprop": ("x_fprop", x, "w_fprop", w), "dgrad": ("dy_dgrad", dy, "w_dgrad", w)}
    operands["wgrad"] = ("dy_wgrad", dy, "x_wgrad", x)
    slot_a, a, slot_b, b = operands[product]
    (a, scale_a), (b, scale_b) = plan.operand(slot_a, a, key), plan.operand(slot_b, b, key)
    a, b = (a.T if product == "wgrad" else a), (b.T if product == "fprop" else b)
    assert torch.equal(results["blackwell"], grouped_product(a, b) * (scale_a * scale_b))
    assert not torch.equal(results["blackwell"], results["fp32"])
    assert (results["blackwell"] - results["fp32"]).abs().max() < 1e-6 * results["fp32"].abs().max()


def run(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, product: str) -> torch.Tensor:
    layer.weight.grad = None
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": layer.weight.grad}[product]


def test_products_of_other_operands_are_summed_in_fp32(eager):
    """FP4 times BF16 is no FP4 product, and says so where it is asked for by name."""
    recipe = fp4repro.recipe("nvfp4").replace(accumulate="blackwell", dy_wgrad=None)
    layer = nn.Linear(64, 64)
    convert(layer, recipe)
    ways = {name: layer.plan.accumulate(name) for name in ("fprop", "dgrad", "wgrad")}
    assert ways == {"fprop": "blackwell", "dgrad": "blackwell", "wgrad": "fp32"}
    x = torch.ones(4, 64)
    assert fp4repro.matmul(quantize(x, MXFP4), quantize(x, MXFP4), accumulate="blackwell")[0, 0] == 64
    with pytest.raises(Fp4ReproError, match="mxfp8 times nvfp4"):
        fp4repro.matmul(quantize(x, MXFP8), quantize(x, NVFP4), accumulate="blackwell")


def test_unknown_ways_are_refused(eager):
    q = quantize(torch.ones(2, 16), NVFP4, "stochastic", RandomKey())
    with pytest.raises(Fp4ReproError, match="'fp16' must be fp32 or blackwell"):
        fp4repro.matmul(q, q, accumulate="fp16")
    with pytest.raises(Fp4ReproError, match="must be fp32 or blackwell"):
        fp4repro.recipe("nvfp4").replace(accumulate="hopper")


def test_a_poisoned_operand_poisons_the_product(eager):
    x = torch.ones(2, 128)
    x[0, 3] = math.nan
    bad, good = quantize(x, NVFP4, nonfinite="poison"), quantize(torch.ones(3, 128), NVFP4)
    assert fp4repro.matmul(bad, good, accumulate="blackwell").isnan().all()
