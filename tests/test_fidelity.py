"""The gradient study: its products against the quantised layer's own, its estimates against theory."""

import copy
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import save_llama
from torch import nn

import fp4repro
import fp4repro.fidelity.__main__ as fidelity
import fp4repro.report.__main__ as report
from fp4repro import NVFP4, quantize
from fp4repro.core.lost import lost
from fp4repro.core.quantize import prepare
from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity import subject as subjects
from fp4repro.fidelity.gradients import GradientStudy, chosen_blocks, slope, whole_rows
from fp4repro.fidelity.local import Linear
from fp4repro.fidelity.moments import Errors, powers_of_two, square
from fp4repro.fidelity.subject import of_pretrained
from fp4repro.fidelity.variants import variants
from fp4repro.fidelity.whole import Whole
from fp4repro.layers import blocks_of
from fp4repro.pretrained import Unavailable
from fp4repro.recipes import PRODUCTS
from fp4repro.report import fidelity_metrics as names
from fp4repro.report.fidelity import claims, fidelity_markdown, models_of
from fp4repro.report.schema import Row, parse_rows

pytestmark = pytest.mark.usefixtures("eager")
ROOT = Path(__file__).parents[1]
TOKENS, IN, OUT = 128, 96, 64


@pytest.fixture(scope="module")
def tensors():
    """x, dy and W of one linear, BF16 values but for W."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, IN, generator=g).bfloat16()
    dy = (torch.randn(TOKENS, OUT, generator=g) * 1e-4).bfloat16()
    return x, dy, torch.randn(OUT, IN, generator=g) / 10


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"{n} and {n * n}, then {n**3}. " for n in range(400)))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(save_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def subject(llama, text):
    return of_pretrained(llama, None, TOKENS, text)


# --- moments ---


def test_bias_and_noise_are_told_apart():
    """Draws of known bias and spread: the estimate is right on average; |mean|^2 alone is not."""
    g = torch.Generator().manual_seed(1)
    bias, spread, n = 0.2, 1.0, 4
    estimates, plain = [], []
    for _ in range(200):
        errors = Errors()
        for _ in range(n):
            errors.add(bias + spread * torch.randn(400, generator=g))
        estimates.append(errors.bias_square / 400)
        plain.append(errors.means[n] / 400)
        assert errors.means.keys() == {1, 2, 4}
    mean = sum(estimates) / 200
    assert abs(mean - bias**2) < 0.005
    assert abs(sum(plain) / 200 - bias**2 - spread**2 / n) < 0.005
    assert min(estimates) < mean < max(estimates)


def test_a_single_draw_is_all_bias():
    errors = Errors()
    errors.add(torch.tensor([3.0, 4.0]))
    assert (errors.mean_square, errors.bias_square, errors.variance) == (25, 25, 0)
    assert powers_of_two(9) == [1, 2, 4, 8] and powers_of_two(1) == [1]


def test_slope_of_a_curve():
    assert slope({1: 1.0, 2: 2**-0.5, 4: 0.5}) == pytest.approx(-0.5)
    assert slope({1: 0.3, 2: 0.3}) == 0 and slope({1: 1.0}) is None and slope({1: 0.0, 2: 0.0}) is None


# --- local products ---


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8", "no_2d", "rht_all", "signs_drawn", "sr_weights"])
def test_products_are_those_of_the_quantised_layer(tensors, name):
    """The study's draw 0 is what a converted nn.Linear computes, seed, step, layer and role the same;
    stochastic gradients agree in distribution only, since the layer salts their key by its data."""
    x, dy, w = tensors
    recipe = variants()[name]
    linear = Linear(x, dy, w, number=0, draws=1)
    layer = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    layer[0].weight.data.copy_(w)
    fp4repro.convert(layer, recipe.replace(keep=fp4repro.KeepBF16(), stochastic=()))
    fp4repro.set_step(layer, 0)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    got = {"fprop": y.detach(), "dgrad": leaf.grad, "wgrad": layer[0].weight.grad}
    plain = recipe.replace(stochastic=())
    for product in PRODUCTS:
        exact = linear.exact[product]
        expected = (got[product].float() - exact).norm() ** 2 / exact.norm() ** 2
        found = linear.fidelity(product, plain)
        assert found.error == pytest.approx(float(expected), rel=1e-4), product
        assert found.noise == 0 or name == "signs_drawn"
        assert found.bias == pytest.approx(found.error, rel=1e-4)


def test_exact_products_and_errors_by_hand(tensors):
    x, dy, w = tensors
    linear = Linear(x, dy, w, number=0, draws=1)
    for product, expected in (
        ("fprop", x.double() @ w.double().T),
        ("dgrad", dy.double() @ w.double()),
        ("wgrad", dy.double().T @ x.double()),
    ):
        assert (linear.exact[product] - expected).norm() < 1e-5 * expected.norm()
    q = quantize(x, NVFP4).dequantize().double() @ quantize(w, NVFP4).dequantize().double().T
    exact = x.double() @ w.double().T
    found = linear.fidelity("fprop", variants()["no_2d"])
    assert found.error == pytest.approx(float((q - exact).norm() ** 2 / exact.norm() ** 2), rel=0.01)
    cosine = torch.nn.functional.cosine_similarity(q.flatten(), exact.flatten(), 0)
    assert found.cosine == pytest.approx(float(cosine), abs=1e-4)
    # sqrt(9.0e-3 + 9.0e-3) for Gaussian operands
    assert found.error**0.5 == pytest.approx(0.134, rel=0.05)


def test_mean_error_falls_as_one_over_root_n_with_stochastic_rounding_only(tensors):
    """The claim of arXiv 2509.25149, section 4.4: from 1 to 64 draws the slope is -1/2 with SR, 0 without."""
    linear = Linear(*tensors, number=0, draws=64)
    of = variants()
    for product in ("dgrad", "wgrad"):
        headroom, stochastic, nearest = (
            {n: v**0.5 for n, v in linear.fidelity(product, of[name]).rounding.items()}
            for name in ("sr_headroom", "nvfp4", "no_sr")
        )
        assert stochastic.keys() == nearest.keys() == {1, 2, 4, 8, 16, 32, 64}
        assert abs(slope(headroom) + 0.5) < 0.02
        assert -0.51 < slope(stochastic) < -0.42  # what is clipped stays
        assert slope(nearest) == 0
        assert stochastic[1] > nearest[1] > 4 * stochastic[64]


def test_clipping_is_what_keeps_stochastic_rounding_from_being_unbiased(tensors):
    """A block's maximum above 6 is clipped in every draw; head-room of 16/17 takes that bias away."""
    linear = Linear(*tensors, number=0, draws=256)
    of = variants()
    plain, headroom = (linear.fidelity("dgrad", of[name]).rounding for name in ("nvfp4", "sr_headroom"))
    assert plain[256] * 256 / plain[1] > 1.5  # 1 without bias
    assert headroom[256] * 256 / headroom[1] < 1.3
    assert headroom[1] > plain[1]  # and costs noise


def test_bias_of_the_whole_product_is_that_of_the_other_operand(tensors):
    """Rounding dy stochastically leaves the error of Q(W): the bias is no less than that, and no more."""
    linear = Linear(*tensors, number=0, draws=32)
    of = variants()
    found = linear.fidelity("dgrad", of["nvfp4"])
    alone = linear.fidelity("dgrad", of["nvfp4"].replace(dy_dgrad=None))
    assert found.bias == pytest.approx(alone.error, rel=0.05)
    assert found.noise > 0 and found.error == pytest.approx(found.bias + found.noise, rel=1e-4)
    assert found.curve[32] == pytest.approx(found.bias + found.noise / 32, rel=0.01)


def test_chain_rule_gap(tensors):
    """dgrad of other weights than fprop's differentiates another function: not so with 16x16 tiles."""
    _, dy, w = tensors
    linear = Linear(*tensors, number=0, draws=1)
    of = variants()
    assert linear.fidelity("dgrad", of["nvfp4"]).chain_rule == 0
    assert linear.fidelity("dgrad", of["one_dim"]).chain_rule == 0
    forward, backward = quantize(w, NVFP4).dequantize(), quantize(w.T, NVFP4).dequantize().T
    expected = square(dy.float() @ (forward - backward)) / square(dy.float() @ w)
    assert linear.fidelity("dgrad", of["no_2d"]).chain_rule == pytest.approx(expected, rel=1e-3)
    assert linear.fidelity("dgrad", of["sr_weights"]).chain_rule > 0
    assert linear.fidelity("dgrad", of["rht_fprop"]).chain_rule is None
    assert linear.fidelity("wgrad", of["no_2d"]).chain_rule is None


def test_what_recipes_share_is_made_once(tensors):
    """Some thirty recipes need less than half of their products, and figures are the same alone."""
    linear = Linear(*tensors, number=0, draws=2)
    of = variants()
    found = {(n, p): linear.fidelity(p, r) for n, r in of.items() for p in PRODUCTS}
    compared = [key for key in linear._made if key[0] == "_compare"]
    assert len(of) < len(compared) < 0.5 * len(found)
    for name in ("nvfp4", "sr_weights", "signs_drawn"):
        alone = Linear(*tensors, number=0, draws=2)
        assert all(alone.fidelity(p, of[name]) == found[name, p] for p in PRODUCTS)
    other = Linear(*tensors, number=1, draws=2).fidelity("dgrad", of["nvfp4"])
    assert other.error != found["nvfp4", "dgrad"].error  # another layer, other bits
    assert other.error == pytest.approx(found["nvfp4", "dgrad"].error, rel=0.05)


def test_a_shape_that_a_format_cannot_hold_has_no_figure():
    g = torch.Generator().manual_seed(0)
    x, dy, w = (torch.randn(*s, generator=g).bfloat16() for s in ((128, 16), (128, 48), (48, 16)))
    linear = Linear(x, dy, w, number=0, draws=1)
    assert linear.fidelity("fprop", variants()["mxfp4"]) is None  # 16 is no multiple of 32
    assert linear.fidelity("fprop", variants()["nvfp4"]) is not None


def test_losses_are_counted_by_slot(tensors):
    x, dy, w = tensors
    linear = Linear(x * 1e-3, dy, w, number=0, draws=1)
    of = variants()
    assert linear.losses("x_fprop", of["bf16"]) == {}
    counts = linear.losses("x_fprop", of["nvfp4"])
    got = quantize((x * 1e-3), NVFP4).dequantize()
    assert counts["flushed"] == int(((x != 0) & (got == 0)).sum()) > 0
    assert counts["values"] == x.numel() and counts["blocks"] == x.numel() // 16


def test_scales_that_underflow():
    """Decode scales of E4M3: normal, subnormal below 2^-6, zero; and a block of zeros, which counts not."""
    x = torch.ones(4, 16)
    x[1], x[2], x[3] = 1.1e-5, 1e-8, 0  # of 448: 0.0049, subnormal; 4.5e-6, zero
    prepared = prepare(x, NVFP4)
    counts = lost(prepared, x, quantize(x, NVFP4).dequantize())
    assert (counts["blocks"], counts["zero_scales"], counts["subnormal_scales"]) == (3, 1, 1)
    assert (counts["kept"], counts["flushed"], counts["clipped"]) == (48, 16, 0)


def test_variants_are_twenty_at_least_and_all_different():
    of = variants()
    assert len(of) >= 20
    bare = [recipe.replace(name="x") for recipe in of.values()]
    assert all(a != b for i, a in enumerate(bare) for b in bare[:i])


def test_more_variants_are_added_where_they_quantise_otherwise():
    whole = fp4repro.recipe("nvfp4")
    more = {
        "last_4": whole.replace(keep=fp4repro.KeepBF16(last=4)),  # blocks alone
        "no_rounding_bits": whole.replace(random_bits=16),
        "again": whole.replace(random_bits=16),
        "no_sr": whole.replace(stochastic=()),
    }
    of = variants(more)
    assert of.keys() - variants().keys() == {"no_rounding_bits"}


# --- subjects ---


def test_a_subject_is_the_model_on_the_text(subject, text):
    assert subject.tokens.shape == (1, TOKENS) and torch.equal(subject.tokens[:, 1:], subject.targets[:, :-1])
    assert len(subject.linears) == 14 and set(subject.blocks.values()) == {0, 1}
    assert not any("head" in name for name in subject.linears)
    exact = subject.loss(autocast=False)
    logits = subject.model(input_ids=subject.tokens).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), subject.targets.flatten())
    assert exact.item() == pytest.approx(expected.item(), rel=1e-5)
    assert exact.item() != subject.loss().item()
    assert "words.txt" in subject.note and str(TOKENS) in subject.note


def test_blocks_are_those_of_the_layer_rule(subject):
    model = copy.deepcopy(subject.model)
    report_ = fp4repro.convert(model, fp4repro.recipe("nvfp4").replace(keep=fp4repro.KeepBF16(last=1)))
    kept = {name for name, block in blocks_of(model).items() if block == 1}
    assert kept == {name for name, why in report_.kept.items() if "block 1 of 2" in why}


def test_text_and_tokens_that_do_not_do(llama, tmp_path):
    with pytest.raises(Fp4ReproError, match="cannot be read as UTF-8"):
        of_pretrained(llama, None, 128, tmp_path / "none.txt")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(Fp4ReproError, match=r"5 tokens .* 129 are needed"):
        of_pretrained(llama, None, 128, tmp_path / "short.txt")


# --- the study ---


def test_study_of_a_model(subject):
    of = {name: variants()[name] for name in ("bf16", "nvfp4", "no_sr")}
    study = GradientStudy(subject, of, draws=4)
    rows = {(names.split(r.setting)[1], r.metric): r for r in study.rows({})}
    errors = [f.error for _, f in study.found["nvfp4", "wgrad"]]
    assert len(errors) == 14  # the study's figure is a mean over the linears
    row = rows["nvfp4", names.metric("wgrad", names.ERROR)]
    assert row.value == pytest.approx(math.sqrt(sum(errors) / 14)) and row.n == 4 and subject.note in row.note
    blocks = [rows["nvfp4", f"wgrad_relative_error@block-0{b}"].value ** 2 for b in (0, 1)]
    assert sum(blocks) / 2 == pytest.approx(row.value**2)
    assert ("nvfp4", "dgrad_relative_error@down_proj") in rows
    assert rows["nvfp4", "dgrad_rounding_slope"].value == pytest.approx(-0.5, abs=0.1)
    assert rows["no_sr", "dgrad_rounding_slope"].value == 0
    assert rows["bf16", "wgrad_relative_error"].value < 0.01 < rows["no_sr", "wgrad_relative_error"].value
    assert 0 < rows["nvfp4", "x_fprop_flushed_share"].value < 0.2
    assert ("bf16", "x_fprop_flushed_share") not in rows
    assert all(layer.weight.grad is None for layer in subject.linears.values())
    again = GradientStudy(subject, of, draws=4)
    assert {(names.split(r.setting)[1], r.metric): r for r in again.rows({})} == rows


def test_blocks_spread_evenly():
    deep = SimpleNamespace(blocks={f"b.{i}.{n}": i for i in range(30) for n in "xy"})

    def chosen(count):
        return sorted({deep.blocks[name] for name in chosen_blocks(deep, count)})

    assert chosen(None) == chosen(30) == chosen(99) == list(range(30))
    assert chosen(2) == [0, 29] and chosen(4) == [0, 10, 19, 29] and chosen(1) == [0]


def test_whole_model(subject):
    """Against gradients by hand; FP32 is exact, and the model is as it was afterwards."""
    whole = Whole(subject)
    state = {k: v.clone() for k, v in subject.model.state_dict().items()}
    of = variants()
    bf16, nvfp4 = whole.fidelity(of["bf16"]), whole.fidelity(of["plain"])
    assert bf16.quantised == 0 and nvfp4.quantised == 14 and bf16.error < 1e-3 < nvfp4.error
    assert all(type(layer) is nn.Linear for layer in subject.linears.values())
    assert all(torch.equal(v, state[k]) for k, v in subject.model.state_dict().items())
    fp4repro.convert(subject.model, of["plain"])
    fp4repro.set_step(subject.model, 0)
    subject.loss().backward()
    difference = exact = dot = norm = 0.0
    for name, layer in subject.linears.items():
        difference += square(layer.weight.grad - whole.exact[name])
        exact += square(whole.exact[name])
        dot += float((layer.weight.grad * whole.exact[name]).sum())
        norm += square(layer.weight.grad)
    assert nvfp4.error == pytest.approx(difference / exact, rel=1e-4)
    assert nvfp4.cosine == pytest.approx(dot / math.sqrt(exact * norm), rel=1e-4)
    drawn = whole.fidelity(of["add_sr"], 4)
    assert drawn.noise > 0 and drawn.spread > 0
    assert drawn.error == pytest.approx(drawn.bias + drawn.noise, rel=1e-3)
    kept = {r.metric: r for r in whole_rows(subject, {"nvfp4": of["nvfp4"]}, 2, {})}
    assert kept[names.WHOLE_ERROR].n == 2 and names.WHOLE_BIAS in kept


def test_commands_write_table_and_figure(tmp_path, llama, text, command):
    out = tmp_path / "rows.csv"
    given = ("gradients", "--model", llama, "--text", text, "--tokens", 128, "--draws", 2, "--out", out)
    some = ("bf16", "nvfp4", "no_sr", "no_2d", "plain")
    command(fidelity, *given, "--recipes", *some, "--whole", "bf16", "nvfp4")
    first = out.read_bytes()
    command(fidelity, *given, "--recipes", *some, "--whole", "bf16", "nvfp4")
    assert out.read_bytes() == first
    rows = parse_rows(out)
    assert {names.split(r.setting) for r in rows} == {(llama, name) for name in some}
    files = {f"--{kind}": tmp_path / f"fidelity.{kind[:3]}" for kind in ("table", "markdown", "png", "svg")}
    flat = [part for pair in files.items() for part in pair]
    scale = ROOT / "configs" / "scales" / "smoke.yaml"
    command(report, "fidelity", "--scale", scale, "--rows", out, *flat)
    assert files["--table"].read_bytes() == first
    markdown = files["--markdown"].read_text()
    assert f"## {llama}" in markdown and "| no_2d " in markdown and "What theory says" in markdown
    assert files["--png"].read_bytes().startswith(b"\x89PNG") and ">block<" in files["--svg"].read_text()
    found = {claim: verdict for claim, _, verdict in claims(models_of(rows)[llama])}
    assert found["2D weights: dgrad multiplies what fprop did, 1x16 does not"] == "yes"


def test_a_model_that_cannot_be_had_is_not_run(tmp_path, command, monkeypatch):
    def nowhere(name):
        raise Unavailable("no network")

    monkeypatch.setattr(subjects, "load_pretrained", nowhere)
    out = tmp_path / "rows.csv"
    given = ("gradients", "--model", "x/y", "--out", out, "--text", __file__)
    with pytest.raises(Unavailable):
        command(fidelity, *given)
    assert not out.exists()
    command(fidelity, *given, "--if-available")
    rows = parse_rows(out)
    assert len(rows) >= 20 and all(r.value is None and r.note == "not run: no network" for r in rows)
    text = fidelity_markdown(rows)
    assert "## x/y" in text and "Not run: no network." in text


def test_mistakes_are_sentences(tmp_path, llama, command):
    out = ("--out", tmp_path / "out.csv")
    for said, arguments in (
        ("nothing to study", ()),
        ("there is no recipe 'nvfp5' in the gradient study", ("--model", llama, "--recipes", "nvfp5")),
        ("belong together", ("--run", tmp_path)),
        ("give --scale too", ("--run", tmp_path, "--data", tmp_path)),
        ("is a run of ours", ("--model", "hybrid")),
        ("0 draws, all blocks", ("--model", llama, "--text", __file__, "--draws", 0)),
        ("0 tokens", ("--model", llama, "--tokens", 0)),
    ):
        with pytest.raises(Fp4ReproError, match=said):
            command(fidelity, "gradients", *arguments, *out)


def test_rows_of_another_study_are_refused():
    row = Row(experiment="pretrain", setting="a/b", metric="m", value=1.0, unit="1")
    with pytest.raises(Fp4ReproError, match="not one of the fidelity study"):
        models_of([row])


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setenv("FP4REPRO_COMPILE", "0")

    def call(stage, *arguments):
        monkeypatch.setattr(sys, "argv", ["stage", *map(str, arguments)])
        threads = torch.get_num_threads()
        try:
            stage.main()
        finally:
            torch.set_num_threads(threads)

    return call
