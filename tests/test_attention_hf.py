"""fp4_attention inside models: the hybrid by `convert`, Hugging Face models by transformers' interface."""

import copy

import pytest
import torch

import fp4repro
from fp4repro import AttentionRecipe, Fp4ReproError
from fp4repro.attention.module import Fp4CausalAttention
from fp4repro.models import HybridModel, ModelConfig

pytestmark = pytest.mark.usefixtures("eager")

CONFIG = ModelConfig(
    pattern="*-*-", width=64, vocabulary=96, ffn_width=128, query_heads=4, kv_heads=2, head_dim=16
)
ATTENTION = fp4repro.recipe("bf16").replace(name="attention", attention=AttentionRecipe())
STOCHASTIC = ATTENTION.replace(attention=AttentionRecipe(ds_rounding="stochastic"))
TOKENS = torch.arange(96).view(2, 48) * 7 % 96


def hybrid():
    return HybridModel(CONFIG, generator=torch.Generator().manual_seed(0))


def loss_and_gradients(model, step=None):
    if step is not None:
        fp4repro.set_step(model, step)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(TOKENS, TOKENS)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def same(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_the_hybrid_takes_it_and_gives_it_back():
    model, plain = hybrid(), loss_and_gradients(hybrid())
    names = list(model.state_dict())
    report = fp4repro.convert(model, ATTENTION)
    assert report.attention == ["blocks.0.mixer.core", "blocks.2.mixer.core"]
    assert "blocks.0.mixer.core: attention attention" in str(report) and not report.swapped
    assert isinstance(model.blocks[0].mixer.core, Fp4CausalAttention)
    assert list(model.state_dict()) == names
    quantised = loss_and_gradients(model)
    assert not same(quantised, plain)
    assert (quantised[0] - plain[0]).abs() < 0.02
    assert len(fp4repro.convert(model, ATTENTION).attention) == 2
    assert same(loss_and_gradients(model), quantised)  # not wrapped twice
    assert fp4repro.convert(model, fp4repro.recipe("bf16")).attention == []
    assert same(loss_and_gradients(model), plain)


def test_off_is_bit_identical():
    plain = loss_and_gradients(hybrid())
    for attention in (None, AttentionRecipe(lowered=(), views=())):
        model = hybrid()
        assert fp4repro.convert(model, ATTENTION.replace(attention=attention)).attention == []
        assert same(loss_and_gradients(model), plain)


def test_random_bits_follow_the_step_and_the_layer():
    model = hybrid()
    fp4repro.convert(model, STOCHASTIC, seed=3)
    first, again, other = (loss_and_gradients(model, step) for step in (1, 1, 2))
    assert same(first, again) and not same(first, other)
    assert [b.mixer.core.plan.layer for b in model.blocks[::2]] == [0, 1]
    fp4repro.set_step(model, 1, microbatch=1)
    assert not same(loss_and_gradients(model), first)
    clone = copy.deepcopy(model)
    assert same(loss_and_gradients(clone, 1), first)


def test_linears_and_attention_share_a_recipe_and_a_clock():
    model = hybrid()
    report = fp4repro.convert(model, fp4repro.recipe("nvfp4").replace(attention=AttentionRecipe()))
    assert report.swapped and len(report.attention) == 2
    fp4repro.set_step(model, 5)
    assert model.blocks[0].mixer.core.plan.clock is model.blocks[0].mixer.q.plan.clock
    assert model.blocks[0].mixer.core.plan.clock.step == 5


# --- transformers ---


@pytest.fixture(scope="module")
def llama_config():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
    )


def llama(config):
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_hugging_face_model_takes_it_and_gives_it_back(llama_config):
    model = llama(llama_config)
    plain = model(TOKENS).logits.detach()
    report = fp4repro.convert(model, ATTENTION)
    assert report.attention == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    out = model(TOKENS, labels=TOKENS)
    out.loss.backward()
    apart = ((out.logits - plain).norm() / plain.norm()).item()
    assert 1e-3 < apart < 0.3
    assert all(p.grad.isfinite().all() for p in model.parameters())
    exact = AttentionRecipe(lowered=("p_do",), views=(), high="operands")
    fp4repro.convert(model, ATTENTION.replace(attention=exact))
    torch.testing.assert_close(model(TOKENS).logits, plain, rtol=1e-4, atol=1e-5)  # scale, heads and mask
    fp4repro.convert(model, fp4repro.recipe("bf16"))
    assert torch.equal(model(TOKENS).logits, plain)


def test_a_hugging_face_model_is_keyed_by_step(llama_config):
    model = llama(llama_config)
    fp4repro.convert(model, STOCHASTIC)

    def gradient(step):
        fp4repro.set_step(model, step)
        model.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    a, b, c = gradient(1), gradient(1), gradient(2)
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_hugging_face_model_inside_another_generates(llama_config):
    wrapped = torch.nn.ModuleDict({"lm": llama(llama_config)})
    assert fp4repro.convert(wrapped, ATTENTION).attention[0] == "lm.model.layers.0.self_attn"
    model = wrapped["lm"]
    got = model.generate(TOKENS[:1, :5], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert got.shape == (1, 8)


def test_a_mask_of_padding_is_refused(llama_config):
    model = llama(llama_config)
    fp4repro.convert(model, ATTENTION)
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    with pytest.raises(
        Fp4ReproError, match=r"LlamaAttention was called with attention_mask.*without padding"
    ):
        model(TOKENS, attention_mask=mask)
    assert model(TOKENS, attention_mask=torch.ones_like(TOKENS)).logits.isfinite().all()
