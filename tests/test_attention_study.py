"""The sensitivity study: its data, what it takes from models, its table, and the training control."""

import sys

import pytest
import torch
from tiny import save_llama

import fp4repro.fullstack.__main__ as fullstack
import fp4repro.report.__main__ as report
from fp4repro import Fp4ReproError
from fp4repro.fullstack import attention_data as data
from fp4repro.fullstack import attention_sensitivity as sensitivity
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.recipes import ATTENTION_PRODUCTS
from fp4repro.report import attention_tables as names
from fp4repro.report.schema import parse_rows, write_rows

pytestmark = pytest.mark.usefixtures("eager")

SMOKE = "configs/scales/smoke.yaml"
WHERE = {"scale": "smoke", "device": "CPU", "torch": "2", "commit": "abc"}
TOKENS = torch.arange(96).view(2, 48) * 7 % 96
TARGETS = TOKENS.roll(-1, 1)


def test_drawn_data_is_what_it_says():
    for name in data.DRAWN:
        assert all(torch.equal(a, b) for a, b in zip(data.drawn(name, 1), data.drawn(name, 1), strict=True))
        assert not torch.equal(data.drawn(name, 1)[0], data.drawn(name, 2)[0])
    plain, common = (data.drawn(name, 0) for name in ("gaussian", "common V"))
    assert data.common_share(plain[2]) < 0.01 < 0.8 < data.common_share(common[2])
    assert data.common_share(data.without_common_v(common)[2]) < 1e-10
    assert data.common_share(data.drawn("biased K", 0)[1]) > 0.7


def test_each_product_is_lowered_once_alone():
    alone = [r.lowered for r in sensitivity.SETTINGS.values() if len(r.lowered) == 1 and not r.views]
    assert sorted(alone) == sorted((name,) for name in ATTENTION_PRODUCTS)
    assert all(r.high == "operands" for r in sensitivity.SETTINGS.values())


def test_a_hybrid_gives_what_its_attention_was_called_with():
    config = ModelConfig("*-*-", 64, 96, ffn_width=64, query_heads=4, kv_heads=2, head_dim=16)
    model = HybridModel(config, torch.Generator().manual_seed(0))
    layers = data.of_hybrid(model, lambda: model(TOKENS, TARGETS))
    assert list(layers) == ["blocks.0.mixer.core", "blocks.2.mixer.core"]
    q, k, _v, do = layers["blocks.2.mixer.core"]
    assert q.shape == do.shape == (2, 4, 48, 16) and k.shape == (2, 2, 48, 16)
    assert all(p.grad is None for p in model.parameters())
    # Back through the output projection by hand: dO is what that linear was handed back.
    handed = {}
    hook = model.blocks[2].mixer.o.register_full_backward_hook(lambda m, i, o: handed.update(dx=i[0]))
    model(TOKENS, TARGETS).backward()
    hook.remove()
    torch.testing.assert_close(do.transpose(1, 2).flatten(2), handed["dx"])


def test_a_hugging_face_model_gives_the_same(monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    before = model.config._attn_implementation
    layers = data.of_transformer(model, TOKENS)
    assert list(layers) == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert model.config._attn_implementation == before
    q, k, v, do = layers["model.layers.0.self_attn"]
    assert q.shape == do.shape == (2, 4, 48, 16) and k.shape == v.shape == (2, 2, 48, 16)
    handed = {}
    projection = model.model.layers[0].self_attn.o_proj
    projection.register_full_backward_hook(lambda m, i, o: handed.update(dx=i[0]))
    model(TOKENS, labels=TOKENS).loss.backward()
    torch.testing.assert_close(do.transpose(1, 2).flatten(2), handed["dx"])
    monkeypatch.setattr(sensitivity, "SETTINGS", dict(list(sensitivity.SETTINGS.items())[:1]))
    rows = list(sensitivity.transformer_rows("llama", model, TOKENS, WHERE, "a Llama"))
    assert {row.setting.partition("/")[0] for row in rows} == {"llama", "llama, V centred"}
    assert "3 attention layers of a Llama" in rows[0].note


def test_layers_are_chosen_over_the_depth():
    layers = dict.fromkeys("abcdefg", ())
    assert [n for n, _ in data.evenly(layers, 4)] == ["a", "c", "e", "g"]
    assert [n for n, _ in data.evenly(layers, 9)] == list("abcdefg")


@pytest.fixture
def rows():
    sets = {f"seed {seed}": data.drawn("gaussian", seed) for seed in (0, 1)}
    return list(sensitivity.study("gaussian", sets, "256 tokens", WHERE))


def test_table_and_figure(rows, tmp_path, monkeypatch):
    values = {row.metric: row.value for row in rows if row.setting == "gaussian/dO V^T"}
    assert values[names.ERROR_O] < 1e-6 and values[names.ERROR_DQ] == pytest.approx(0.164, rel=0.15)
    table, markdown, png, svg = (tmp_path / name for name in ("t.csv", "t.md", "t.png", "t.svg"))
    write_rows(table, rows)
    scale = ["--scale", SMOKE, "--table", str(table)]
    out = ["--markdown", str(markdown), "--png", str(png), "--svg", str(svg)]
    monkeypatch.setattr(sys, "argv", ["report", "attention_sensitivity", *scale, *out])
    report.main()
    text = markdown.read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| dO V^T")]
    assert "(0.164)" in line and f"{values[names.ERROR_DQ]:.3f}" in line
    assert "of V's sum of squares" in text and png.stat().st_size > 10_000
    assert "Relative error of dQ" in svg.read_text()


def test_rows_of_another_experiment_are_refused(rows):
    import dataclasses

    with pytest.raises(Fp4ReproError, match="attention_sensitivity wrote"):
        names.attention_markdown([dataclasses.replace(rows[0], experiment="formats")])


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fullstack", "attention_sensitivity", *map(str, arguments)])
    fullstack.main()


@pytest.mark.parametrize("given", ["--run", "--data"])
def test_a_run_without_its_data_is_refused(monkeypatch, tmp_path, given):
    with pytest.raises(Fp4ReproError, match="--run and --data belong together"):
        command(monkeypatch, "--scale", SMOKE, given, "x", "--out", tmp_path / "o.csv")


def test_a_pretrained_model_reads_the_scales_text_or_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "DRAWN", {})
    monkeypatch.setattr(sensitivity, "SETTINGS", dict(list(sensitivity.SETTINGS.items())[:1]))
    model, text, out = save_llama(tmp_path / "llama"), tmp_path / "own.txt", tmp_path / "o.csv"
    text.write_text("one two three " * 40)
    given = ("--scale", SMOKE, "--model", model, "--tokens", 128, "--out", out)
    for more, source in ((), "held-out text ("), (("--text", text), "own.txt"):
        command(monkeypatch, *given, *more)
        rows = parse_rows(out)
        assert {row.setting.rpartition("/")[0] for row in rows} == {str(model), f"{model}{names.CENTRED}"}
        assert f"2 attention layers of the model {model}; 128 tokens of {source}" in rows[0].note


def test_the_command_writes_drawn_data(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "LENGTH", 32)
    monkeypatch.setattr(sensitivity, "SEEDS", range(1))
    out = tmp_path / "o.csv"
    command(monkeypatch, "--scale", SMOKE, "--out", out)
    got = parse_rows(out)
    assert len(got) == len(data.DRAWN) * (2 + 4 * len(sensitivity.SETTINGS))
    assert {row.experiment for row in got} == {names.EXPERIMENT} and not any(r.value is None for r in got)
