"""fp4_attention against the plain definition, autograd and float64, and the error of each product."""

import dataclasses

import pytest
import torch
from attention_cases import FULL_STACK, OFF, WITHOUT_V, draw, errors, ours, plain, relative, with_gradients
from torch.autograd.graph import saved_tensors_hooks

import fp4repro
from fp4repro import NVFP4, AttentionRecipe, Fp4ReproError, RandomKey, fake_quantize, fp4_attention
from fp4repro.attention import passes, tiles
from fp4repro.recipes import ATTENTION_PRODUCTS

pytestmark = pytest.mark.usefixtures("eager")

SEEDS = range(3)
STACK = ("qk", "qk_again", "ds_k", "ds_q")


@pytest.fixture(scope="module")
def gaussian():
    return [draw(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def common_v():
    """V = N / 2 + 2 c, one c for all keys."""
    return [_changed(draw(seed), 2, lambda x, c: x / 2 + 2 * c, seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def biased_k():
    return [_changed(draw(seed), 1, lambda x, c: x + 2.5 * c, seed) for seed in SEEDS]


def _changed(tensors, place, change, seed):
    c = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(100 + seed))
    tensors[place] = change(tensors[place], c)
    return tensors


# --- the algorithm, quantisers off ---


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "length"), [((1, 1), 64), ((6, 2), 75), ((4, 1), 200)])
def test_without_quantisers_it_is_attention(heads, length, causal):
    """In float64 against autograd of the definition: grouped queries, odd lengths, several tiles."""
    tensors = draw(1, heads, length, 32, batch=2, dtype=torch.float64)
    expected = with_gradients(lambda *x: plain(*x, causal), *tensors)
    for recipe in (OFF, OFF.replace(row_term="p"), OFF.replace(row_term="high_output"), OFF.replace(tile=16)):
        for got, exact in zip(ours(recipe, *tensors, causal=causal), expected, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)


def test_gradients_of_float64_against_differences():
    q, k, v, _ = (x.requires_grad_() for x in draw(2, (2, 1), 20, 16, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda *x: fp4_attention(*x, OFF), (q, k, v), atol=1e-6)


@pytest.mark.parametrize("smooth", [("k",), ("v",), ("k", "v")])
def test_smoothing_is_exact_without_quantisers(smooth):
    """T-D3: to 1e-5 in float32."""
    tensors = draw(3, (4, 2), 96, 32)
    tensors[1] += 3
    tensors[2] += 3
    for got, exact in zip(
        ours(OFF.replace(smooth=smooth), *tensors), with_gradients(plain, *tensors), strict=True
    ):
        assert relative(got, exact) < 1e-5


def test_keys_and_queries_of_different_numbers():
    q, k, v, do = draw(4, (2, 2), 50, 32, dtype=torch.float64)
    q, do = q[:, :, :7], do[:, :, :7]
    expected = with_gradients(lambda *x: plain(*x, False), q, k, v, do)
    for got, exact in zip(ours(OFF, q, k, v, do, causal=False), expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)


def test_bf16_operands_and_outputs():
    """In BF16 as torch's own: errors of its size, types kept."""
    tensors = [x.bfloat16() for x in draw(5, (4, 2), 130)]
    got = ours(AttentionRecipe(lowered=(), views=()), *tensors)
    exact = with_gradients(plain, *(x.double() for x in tensors))
    torchs = with_gradients(
        lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True),
        *tensors,
    )
    for mine, reference, other in zip(got, exact, torchs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert 1e-4 < relative(mine, reference) < max(1.5 * relative(other, reference), 6e-3)


def test_p_is_rounded_to_bf16_for_its_two_products():
    """O = bf16(P) V and dV = bf16(P)^T dO, to what another order of sums leaves; P as it is would be
    hundreds of times as far off."""
    q, k, v, do = draw(7, (2, 2), 96, 32)
    q, k, v, do = (x.bfloat16().double() for x in (q, k, v, do))
    seen = torch.ones(96, 96, dtype=torch.bool).tril()
    p = (q @ k.mT / 32**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    got = ours(AttentionRecipe(lowered=(), views=()), *(x.float() for x in (q, k, v, do)))
    for place, product in ((0, lambda p: p @ v), (3, lambda p: p.mT @ do)):
        assert relative(got[place], product(p.float().bfloat16().double())) < 3e-5
        assert relative(got[place], product(p)) > 5e-4


# --- the quantised backward ---


def straight_through(x, axis=-1):
    q = fake_quantize(x.detach().float().transpose(-1, axis).contiguous(), NVFP4).transpose(-1, axis)
    return x + (q.to(x.dtype) - x).detach()


@pytest.mark.parametrize("smooth", [(), ("k", "v")])
def test_backward_is_that_of_the_quantised_forward(smooth):
    """T-D4: autograd of the fake-quantised forward, to 1e-5, where dS is not quantised."""
    tensors = draw(6, (4, 2), 96, 32)

    def quantised(q, k, v):
        mean = 0
        if smooth:
            k, mean = k - k.mean(-2, keepdim=True), v.mean(-2, keepdim=True)
            v = v - mean
            mean = mean.repeat_interleave(2, 1)
        return plain(*(straight_through(x) for x in (q, k, v))) + mean

    recipe = FULL_STACK.replace(lowered=("qk", "qk_again"), smooth=smooth)
    for got, expected in zip(ours(recipe, *tensors), with_gradients(quantised, *tensors), strict=True):
        assert relative(got, expected) < 1e-5
    lowered = ours(recipe.replace(lowered=STACK), *tensors)
    assert relative(lowered[1], with_gradients(quantised, *tensors)[1]) > 0.05  # the check can fail


def row_sums(monkeypatch, recipe, tensors):
    """Largest sum of a row of dS over its largest value, before it is quantised."""
    found = []
    original = passes.Work._tile

    def spy(self, x, name, axis, use=0):
        if name == "ds_k":
            found.append((x.sum(-1).abs().max() / x.abs().max()).item())
        return original(self, x, name, axis, use)

    monkeypatch.setattr(passes.Work, "_tile", spy)
    ours(recipe, *tensors)
    return max(found)


def test_rows_of_ds_sum_to_zero(monkeypatch):
    """T-D5, and the control of T-D6: P from Q and K in high precision, D from the lowered output."""
    tensors = draw(7, (2, 1), 96)
    for recipe in (
        FULL_STACK,
        FULL_STACK.replace(smooth=("k", "v")),
        FULL_STACK.replace(lowered=(*STACK, "pv"), row_term="high_output"),
        FULL_STACK.replace(lowered=ATTENTION_PRODUCTS, row_term="p"),
    ):
        assert row_sums(monkeypatch, recipe, tensors) < 1e-5
    control = FULL_STACK.replace(lowered=("qk", "ds_k", "ds_q"), views=())
    assert not control.same_p
    assert row_sums(monkeypatch, control, tensors) > 0.1
    assert row_sums(monkeypatch, control.replace(row_term="p"), tensors) < 1e-5
    assert row_sums(monkeypatch, FULL_STACK.replace(lowered=(*STACK, "pv")), tensors) > 0.01


def test_the_control_looks_better_in_one_step(gaussian):
    """T-D6: the spec has .138 against .171 for dQ."""
    control = errors(FULL_STACK.replace(lowered=("qk", "ds_k", "ds_q"), views=()), gaussian)
    assert control[1] == pytest.approx(0.138, rel=0.15)
    assert control[1] < errors(WITHOUT_V, gaussian)[1]


# --- sensitivity of the products: the spec's prototype as oracle, T-D1 to T-D3 ---

ALONE = {
    ("qk", "qk_again"): (0.111, 0.114, 0.115, 0.114),
    ("pv",): (0.125, 0.065, 0.061, 0),
    ("p_do",): (0, 0, 0, 0.134),
    ("do_v",): (0, 0.164, 0.161, 0),
    ("ds_k",): (0, 0.128, 0, 0),
    ("ds_q",): (0, 0, 0.128, 0),
    ATTENTION_PRODUCTS: (0.167, 0.249, 0.246, 0.179),
}


@pytest.mark.parametrize("lowered", ALONE, ids="+".join)
def test_error_of_each_product_alone(gaussian, lowered):
    got = errors(OFF.replace(lowered=lowered), gaussian)
    assert got == pytest.approx(ALONE[lowered], rel=0.15, abs=1e-5)


def test_error_of_the_full_stack_set(gaussian):
    assert errors(WITHOUT_V, gaussian) == pytest.approx((0.111, 0.171, 0.172, 0.114), rel=0.15)
    assert errors(FULL_STACK, gaussian)[:3] == pytest.approx((0.147, 0.198, 0.197), rel=0.15)
    again = errors(FULL_STACK.replace(reuse="requant"), gaussian)
    assert errors(FULL_STACK, gaussian)[1] * 1.05 < again[1] < 0.24  # a second rounding of K


def test_a_common_component_of_v(common_v):
    """T-D2, T-D3: dO V^T is what it hurts; without V's mean the damage is gone."""
    dov, dsk = (errors(OFF.replace(lowered=(name,)), common_v)[1] for name in ("do_v", "ds_k"))
    assert dov > 2.5 * dsk and dov == pytest.approx(0.68, rel=0.15)
    assert errors(WITHOUT_V, common_v)[1:3] == pytest.approx((0.174, 0.174), rel=0.15)
    with_pv = WITHOUT_V.replace(lowered=(*STACK, "pv"))
    assert errors(with_pv, common_v)[1] == pytest.approx(0.352, rel=0.15)
    assert errors(with_pv.replace(row_term="high_output"), common_v)[1] == pytest.approx(0.174, rel=0.15)
    stored, smoothed = (errors(r, common_v)[1] for r in (FULL_STACK, FULL_STACK.replace(smooth=("v",))))
    assert stored == pytest.approx(0.408, rel=0.15) and smoothed == pytest.approx(0.196, rel=0.15)
    assert stored > 1.8 * smoothed


def test_a_bias_of_k(biased_k):
    biased, smoothed = (errors(r, biased_k) for r in (WITHOUT_V, WITHOUT_V.replace(smooth=("k",))))
    assert biased[1] > 1.5 * smoothed[1] and biased[0] > 1.5 * smoothed[0]
    assert smoothed[:2] == pytest.approx((0.110, 0.177), rel=0.15)


# --- tiles, memory, keys ---


def test_tiles_do_not_change_the_result():
    """O and dV to float32's rounding; dQ and dK by as much as dS's tensor scale, one a tile, moves them:
    a tenth of their error."""
    tensors = draw(8, (2, 1), 200)
    whole, small = (ours(FULL_STACK.replace(tile=tile), *tensors) for tile in (256, 16))
    exact = with_gradients(plain, *(x.double() for x in tensors))
    for place, name in enumerate(("O", "dQ", "dK", "dV")):
        apart = relative(whole[place], small[place])
        assert apart < (1e-6 if name in ("O", "dV") else 0.8 * relative(whole[place], exact[place]))
        sizes = [relative(x[place], exact[place]) for x in (whole, small)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def test_chunks_of_heads_do_not_change_the_result(monkeypatch):
    tensors = draw(9, (8, 4), 64, batch=2)
    recipe = FULL_STACK.replace(lowered=("qk", "qk_again", "do_v", "p_do"))
    together = ours(recipe, *tensors)
    monkeypatch.setattr(tiles, "SCORES", 1)
    for a, b in zip(together, ours(recipe, *tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def saved_bytes(attend):
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        out = attend()
    return sum(kept.values()), out


def test_what_waits_for_the_backward_is_packed_and_linear():
    """Q, K, V in 4.5 bits, O in BF16 and a float32 a row: 0.28 x 3 of 3 in BF16."""
    sizes = {}
    for length in (256, 512):
        q, k, v, _ = (x.bfloat16().requires_grad_() for x in draw(10, (4, 4), length))
        sizes[length], _ = saved_bytes(lambda q=q, k=k, v=v: fp4_attention(q, k, v, AttentionRecipe()))
        tensor = q.numel() * 2
        expected = tensor * (3 * 4.5 / 16 + 1) + 4 * q.numel() // 64
        assert expected <= sizes[length] < expected + 64
        bare, _ = saved_bytes(lambda q=q, k=k, v=v: fp4_attention(q, k, v, AttentionRecipe(row_term="p")))
        assert bare == sizes[length] - tensor
    assert 1.99 < sizes[512] / sizes[256] < 2.01


def test_stochastic_rounding_follows_its_key():
    tensors = draw(11, (2, 1), 80)
    recipe = FULL_STACK.replace(ds_rounding="stochastic")
    a, b, c = (ours(recipe, *tensors, key=RandomKey(0, step)) for step in (1, 1, 2))
    assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
    assert not torch.equal(a[1], c[1]) and not torch.equal(a[2], c[2])
    assert torch.equal(a[0], c[0]) and torch.equal(a[3], c[3])  # dS alone is drawn


def test_stochastic_rounding_is_unbiased():
    """The mean over keys comes near the gradient with dS as it is, as the rounding to nearest does not."""
    tensors = draw(12, (1, 1), 48, 32)
    head_room = NVFP4.replace(target=6 * 16 / 17)
    exact = ours(FULL_STACK.replace(lowered=("qk", "qk_again"), format=head_room), *tensors)[1]
    recipe = FULL_STACK.replace(ds_rounding="stochastic", format=head_room)
    draws = [ours(recipe, *tensors, key=RandomKey(5, step))[1] for step in range(64)]
    one = relative(draws[0], exact)
    assert relative(torch.stack(draws).mean(0), exact) < one / 5


def test_nan_is_carried_on():
    q, k, v, do = draw(13, (1, 1), 32, 32)
    q[0, 0, 3, 3] = torch.nan
    assert ours(FULL_STACK, q, k, v, do)[0].isnan().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(2, 3, 4)}, "batch, heads, length, head_dim"),
        ({"k": torch.zeros(1, 3, 32, 32), "v": torch.zeros(1, 3, 32, 32)}, "divides q's"),
        ({"k": torch.zeros(1, 1, 24, 32), "v": torch.zeros(1, 1, 24, 32)}, "as many queries as keys"),
        ({"q": torch.zeros(1, 2, 32, 24), "k": torch.zeros(1, 1, 32, 24)}, "multiple of 16"),
        ({"v": torch.zeros(1, 1, 32, 32, dtype=torch.float64)}, "one floating-point type"),
        ({"causal": torch.ones(32, 32)}, "no other mask"),
        ({"recipe": fp4repro.recipe("nvfp4")}, "has none"),
        ({"recipe": AttentionRecipe(ds_rounding="stochastic")}, "no key"),
    ],
)
def test_refusals_in_a_sentence(changes, words):
    q, k, v, _ = draw(14, (2, 1), 32, 32)
    given = {"q": q, "k": k, "v": v, "recipe": FULL_STACK} | changes
    with pytest.raises(Fp4ReproError, match=words) as caught:
        fp4_attention(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"lowered": ("qkv",)},
        {"views": ("x",)},
        {"smooth": ("q",)},
        {"reuse": "both"},
        {"row_term": "d"},
        {"ds_rounding": "up"},
        {"random_bits": 4},
        {"tile": 20},
        {"format": NVFP4.with_block(16, 16)},
        {"tiles": 3},
    ],
)
def test_a_recipe_refuses_what_it_does_not_know(changes):
    with pytest.raises(Fp4ReproError, match="AttentionRecipe"):
        AttentionRecipe().replace(**changes)
    assert dataclasses.is_dataclass(AttentionRecipe())
