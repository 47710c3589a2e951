"""Sizes, initial weights, blocks and loss of the hybrid model against plain definitions."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4repro.errors import Fp4ReproError
from fp4repro.models import HybridModel, ModelConfig, parameter_count
from fp4repro.models.attention import Attention, rotate
from fp4repro.models.ffn import FeedForward
from fp4repro.models.loss import ROWS, mean_cross_entropy
from fp4repro.models.mamba import Mamba2, causal_conv
from fp4repro.models.nemotron_h import to_nemotron_h

MODELS = Path(__file__).parents[1] / "configs" / "models"

HYBRID = ModelConfig(
    pattern="M-M*-",
    width=64,
    vocabulary=96,
    ffn_width=128,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    mamba_heads=8,
    mamba_head_dim=16,
    state=18,
    groups=2,
    chunk=8,
    norm_eps=1e-4,
    init_std=0.2,
)
TRANSFORMER = HYBRID.replace(pattern="*-*-", positions="rope")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens_of(config, batch=2, length=21):
    return torch.randint(config.vocabulary, (batch, length), generator=seeded(1))


# Sizes


def load(name):
    return ModelConfig.from_yaml(MODELS / f"{name}.yaml")


def test_nemotron_12b_has_the_published_size_and_shares():
    config = load("nemotron-12b")
    assert [config.pattern.count(letter) for letter in "M-*"] == [28, 28, 6]
    counts = parameter_count(config)
    total = sum(counts.values())
    assert round(total / 1e9, 2) == 12.31
    percent = {kind: round(100 * count / total, 1) for kind, count in counts.items()}
    assert percent == {
        "mamba.in_proj": 26.4,
        "mamba.out_proj": 11.9,
        "mamba.other": 0.0,
        "ffn.up": 23.8,  # 23.9 with the release's narrower in_proj
        "ffn.down": 23.8,
        "attention.q": 1.3,
        "attention.o": 1.3,
        "attention.k": 0.3,
        "attention.v": 0.3,
        "embedding": 5.4,
        "head": 5.4,
        "norm": 0.0,
    }


@pytest.mark.parametrize(("name", "body"), [("tiny", 0.64e6), ("small", 3.49e6)])
def test_small_models_fit_blocks_of_32(name, body):
    config = load(name)
    features = [f for kind in config.kinds for pair in config.linears(kind).values() for f in pair]
    assert all(f % 32 == 0 for f in features)
    counts = parameter_count(config)
    assert sum(counts.values()) - counts["embedding"] - counts["head"] == pytest.approx(body, rel=0.01)


def test_meta_counts_are_those_of_a_real_model():
    model = HybridModel(HYBRID, generator=seeded())
    assert sum(parameter_count(HYBRID).values()) == sum(p.numel() for p in model.parameters())


# Mistakes in a config


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pattern": "M-X"}, r"pattern 'M-X' has 'X' at place 2; the letters are M"),
        ({"pattern": ""}, "pattern is empty"),
        ({"ffn_width": 100}, r"ffn\.up has 100 output .* multiple of 16; nearest that fit: 96 and 112"),
        ({"width": 8}, r"has 8 input features, .*nearest that fit: 16"),
        ({"state": 20}, r"mamba\.in_proj has 344 output features \(2 x mamba_heads.*336 and 352"),
        ({"kv_heads": 3}, "query_heads must be a multiple of kv_heads, but 4 is not one of 3"),
        ({"groups": 3}, "mamba_heads must be a multiple of groups"),
        ({"mamba_heads": 0}, "mamba_heads must be above zero for pattern"),
        ({"width": "64"}, "width must be a whole number, but is '64'"),
        ({"chunk": True}, "chunk must be a whole number"),
        ({"init_std": "1e-2"}, "init_std must be a number"),
        ({"init_std": float("nan")}, "init_std must be above zero"),
        ({"positions": "alibi"}, "positions must be 'none' or 'rope'"),
        ({"head_dim": 5, "positions": "rope"}, "head_dim must be even for RoPE"),
        ({"kv_head": 2}, "no key 'kv_head'; did you mean 'kv_heads'"),
        ({"zzz": 2}, "no key 'zzz'; known are pattern"),
    ],
)
def test_a_mistake_is_one_sentence(changes, sentence):
    with pytest.raises(Fp4ReproError, match=sentence) as raised:
        ModelConfig.from_dict(dataclasses.asdict(HYBRID) | changes)
    assert "\n" not in str(raised.value)


def test_files_are_refused_with_their_name(tmp_path):
    path = tmp_path / "model.yaml"
    for text, sentence in (
        ("pattern: 'M'\nwidth: 64\n", "model.yaml: .*needs the key 'vocabulary'"),
        ("[1, 2]", "must hold `key: value`"),
        ("pattern: *-*-", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(Fp4ReproError, match=sentence):
            ModelConfig.from_yaml(path)
    with pytest.raises(Fp4ReproError, match="cannot be read"):
        ModelConfig.from_yaml(tmp_path / "none.yaml")


def test_a_size_that_no_block_uses_may_be_missing():
    assert ModelConfig(pattern="-", width=32, vocabulary=8, ffn_width=64).kinds == {"ffn"}


# Initial weights


def test_a_seed_gives_the_same_bits_and_leaves_global_state_alone():
    before = torch.get_rng_state()
    one, same, other = (HybridModel(HYBRID, generator=seeded(s)) for s in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    for (name, p), q, r in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        constant = name.endswith((".D", "norm.weight", "norm_weight"))
        assert torch.equal(p, r) == constant


def test_initial_values():
    config = load("tiny")
    model = HybridModel(config, generator=seeded())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            to_residual = name.endswith(("out_proj", "down", ".o"))
            std = config.init_std / math.sqrt(12) if to_residual else config.init_std
            count = module.weight.numel()
            assert module.weight.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * count))
            assert abs(module.weight.mean().item()) < 4 * std / math.sqrt(count)
    assert all((block.norm.weight == 1).all() for block in model.blocks)


def test_initial_values_of_mamba():
    """Of many heads, so that the ends of each range show."""
    mixer = Mamba2(HYBRID.replace(mamba_heads=1024, mamba_head_dim=1, state=16))
    mixer.initialise(seeded())
    for values, low, high in (
        (mixer.A_log.exp(), 1, 16),
        (F.softplus(mixer.dt_bias).log(), math.log(1e-3), math.log(1e-1)),
        (mixer.conv_weight, -0.5, 0.5),
    ):
        places = (values - low) / (high - low)  # uniform in [0, 1]
        assert -1e-3 < places.min() < 0.01 and 0.99 < places.max() < 1 + 1e-3
        assert places.mean().item() == pytest.approx(0.5, abs=4 * 12**-0.5 / 32)
    assert (mixer.D == 1).all() and (mixer.norm_weight == 1).all()


def test_meta_needs_no_generator_and_a_real_model_does():
    assert all(p.is_meta for p in HybridModel(HYBRID, device="meta").parameters())
    with pytest.raises(TypeError, match="generator"):
        HybridModel(HYBRID)


def test_names():
    model = HybridModel(HYBRID, device="meta")
    linears = {n for n, m in model.named_modules() if type(m) is nn.Linear and m.bias is None}
    assert linears == {
        *(f"blocks.{i}.mixer.{n}" for i in (0, 2) for n in ("in_proj", "out_proj")),
        *(f"blocks.{i}.mixer.{n}" for i in (1, 4) for n in ("up", "down")),
        *(f"blocks.3.mixer.{n}" for n in "qkvo"),
        "head",
    }
    others = {n.split(".")[-1] for n, _ in model.blocks[0].mixer.named_parameters()}
    assert others == {"weight", "conv_weight", "dt_bias", "A_log", "D", "norm_weight"}


# Blocks


def test_causal_conv_is_the_sum_over_the_last_taps():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 9, 5)), rng.normal(size=(5, 4))
    expected = np.zeros_like(x)
    for t in range(9):
        for tap in range(4):  # the last tap is the token itself
            if t - 3 + tap >= 0:
                expected[:, t] += x[:, t - 3 + tap] * weight[:, tap]
    found = causal_conv(torch.tensor(x), torch.tensor(weight))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_ffn_squares_the_relu():
    mixer = FeedForward(HYBRID).double()
    x = torch.randn(3, 64, generator=seeded()).double()
    up, down = (m.weight.detach().numpy() for m in (mixer.up, mixer.down))
    expected = np.maximum(x.numpy() @ up.T, 0) ** 2 @ down.T
    np.testing.assert_allclose(mixer(x).detach().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("positions", ["none", "rope"])
def test_attention_equals_its_definition(positions):
    config = HYBRID.replace(positions=positions)
    mixer = Attention(config)
    x = torch.randn(1, 10, 64, generator=seeded())
    q, k, v = ((x[0] @ m.weight.T).detach().double().numpy() for m in (mixer.q, mixer.k, mixer.v))
    mixed = np.zeros((10, 64))
    for head in range(4):
        own = slice(16 * head, 16 * head + 16)
        shared = slice(16 * (head // 2), 16 * (head // 2) + 16)  # two query heads a key head
        qh, kh = q[:, own], k[:, shared]
        if positions == "rope":
            qh, kh = turned(qh), turned(kh)
        scores = (qh @ kh.conj().T).real / 4
        scores[np.triu_indices(10, 1)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        mixed[:, own] = weights / weights.sum(1, keepdims=True) @ v[:, shared]
    expected = mixed @ mixer.o.weight.detach().double().numpy().T
    np.testing.assert_allclose(mixer(x)[0].detach().numpy(), expected, atol=1e-5)


def turned(t, theta=10_000.0):
    """RoPE on complex numbers: pair (i, i + half) times exp(i position rate)."""
    half = t.shape[1] // 2
    rates = theta ** (-np.arange(half) / half)
    return (t[:, :half] + 1j * t[:, half:]) * np.exp(1j * np.arange(len(t))[:, None] * rates)


def test_rope_scores_depend_on_distance_alone():
    q, k = (torch.randn(1, 1, 1, 16, generator=seeded(s)).expand(1, 1, 12, 16) for s in (0, 1))
    scores = (rotate(q, 1e4) @ rotate(k, 1e4).mT)[0, 0]
    for distance in (0, 3, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert (scores[0, 0] - scores[0, 3]).abs() > 1e-3


@pytest.mark.parametrize("config", [HYBRID, TRANSFORMER], ids=["hybrid", "transformer"])
def test_model_is_causal(config):
    model = HybridModel(config, generator=seeded())
    tokens = tokens_of(config)
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % config.vocabulary
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax((0, 2))  # (length,)
    assert difference[:12].max() == 0
    assert (difference[12:] > 1e-4).all()


def test_chunk_changes_no_result():
    tokens = tokens_of(HYBRID)
    with torch.no_grad():
        results = [
            HybridModel(HYBRID.replace(chunk=chunk), generator=seeded())(tokens) for chunk in (4, 8, 64)
        ]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-4)
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-4)


def test_equals_nemotron_h_of_transformers():
    """All blocks against another implementation, in float32, with its weights set to ours."""
    pytest.importorskip("transformers")
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM

    c = HYBRID
    ours = HybridModel(c, generator=seeded())
    settings, weights = to_nemotron_h(c, ours.state_dict())
    theirs = NemotronHForCausalLM(NemotronHConfig(**settings)).eval()
    theirs.load_state_dict(weights)
    tokens = tokens_of(c)
    with torch.no_grad():
        found, expected = ours(tokens), theirs(input_ids=tokens).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# Loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, ROWS, 2 * ROWS + 3])
def test_loss_and_gradient_equal_cross_entropy(count, dtype):
    logits = (5 * torch.randn(count, 33, generator=seeded())).to(dtype).requires_grad_()
    targets = torch.randint(33, (count,), generator=seeded(1))
    loss = mean_cross_entropy(logits, targets)
    (found,) = torch.autograd.grad(3 * loss, logits)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, targets)
    (wanted,) = torch.autograd.grad(3 * expected, exact)
    assert loss.dtype == torch.float32 and found.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    relative = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=relative, atol=1e-9)


def test_loss_of_logits_far_apart():
    logits = torch.tensor([[0.0, -3e4], [3e4, 0.0]], requires_grad=True)
    loss = mean_cross_entropy(logits, torch.tensor([1, 0]))
    assert loss.item() == 1.5e4
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.tolist() == [[0.5, -0.5], [0, 0]]


def test_model_loss_is_that_of_its_logits():
    model = HybridModel(HYBRID, generator=seeded())
    tokens = tokens_of(HYBRID)
    with torch.no_grad():
        logits, loss = model(tokens), model(tokens, tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert logits.shape == (2, 21, 96)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("config", [HYBRID, TRANSFORMER], ids=["hybrid", "transformer"])
def test_trains_under_autocast_with_float32_gradients(config):
    model = HybridModel(config.replace(init_std=0.02), generator=seeded())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = tokens_of(config, 4, 32)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        assert all(p.grad.abs().max() > 0 for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert loss.dtype == torch.float32
    assert losses[0] == pytest.approx(math.log(config.vocabulary), abs=0.1)
    assert losses[-1] < losses[0] - 1
