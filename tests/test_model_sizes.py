"""The models of the papers, built on the meta device: parameters, shares by kind, layers left in BF16."""

from pathlib import Path

import pytest

import fp4repro
from fp4repro.models import HybridModel, ModelConfig, parameter_count
from fp4repro.recipes import KeepBF16

MODELS = Path(__file__).parents[1] / "configs" / "models"


def load(name):
    return ModelConfig.from_yaml(MODELS / f"{name}.yaml")


def in_blocks(counts):
    """Parameters without embedding, head and norms."""
    return sum(count for name, count in counts.items() if "." in name)


def shares_in_bf16(name, keep):
    """Of blocks, and of the blocks' linear weights, that `convert` leaves in BF16."""
    model = HybridModel(load(name), device="meta")
    report = fp4repro.convert(model, fp4repro.recipe("nvfp4").replace(keep=keep))
    block_of = {n: int(n.split(".")[1]) for n in (*report.swapped, *report.kept) if n.startswith("blocks.")}
    kept = {block_of[n] for n in report.kept if n in block_of}
    assert not kept & {block_of[n] for n in report.swapped}
    size = {n: m.weight.numel() for n, m in model.named_modules() if n in block_of}
    weights = sum(size[n] for n in report.kept if n in block_of) / sum(size.values())
    return round(100 * len(kept) / len(model.blocks), 1), round(100 * weights, 1)


@pytest.mark.parametrize(
    ("name", "kinds", "billions"),
    [
        ("nemotron-12b", {"M": 28, "-": 28, "*": 6}, 12.31),
        ("nemotron-12b-v2", {"M": 28, "-": 28, "*": 6}, 12.31),
        ("nemotron-8b", {"M": 24, "-": 24, "*": 4}, 8.08),
        ("transformer-1.2b", {"M": 0, "-": 20, "*": 20}, 1.29),
        ("full-stack-3b", {"M": 0, "-": 28, "*": 28}, 3.02),
    ],
)
def test_published_sizes(name, kinds, billions):
    config = load(name)
    assert {letter: config.pattern.count(letter) for letter in "M-*"} == kinds
    assert round(sum(parameter_count(config).values()) / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("name", "linears", "mamba", "ffn", "attention"),
    # Shares of the released model: Mamba 38.3 %, FFN 47.7 %, attention 3.1 %, of 12,310 M in all.
    [("nemotron-12b-v2", 136, 38.3, 47.7, 3.1), ("nemotron-12b", 136, 38.3, 47.7, 3.1)],
)
def test_shares_of_the_12b_by_kind(name, linears, mamba, ffn, attention):
    config = load(name)
    counts = parameter_count(config)
    total = sum(counts.values())
    shares = [
        100 * sum(count for n, count in counts.items() if n.startswith(kind)) / total
        for kind in ("mamba.", "ffn.", "attention.")
    ]
    assert shares == pytest.approx([mamba, ffn, attention], abs=0.1)
    assert (
        sum(
            len(config.linears(k)) * config.pattern.count(c)
            for k, c in zip(("mamba", "ffn", "attention"), "M-*", strict=True)
        )
        == linears
    )


def test_the_two_12b_differ_in_their_mamba_heads_alone():
    paper, released = load("nemotron-12b"), load("nemotron-12b-v2")
    assert released.replace(mamba_heads=160, mamba_head_dim=64) == paper
    assert (released.mamba_heads, released.mamba_head_dim) == (128, 80)
    assert paper.mamba_inner == released.mamba_inner == 10240
    widths = [c.linears("mamba")["in_proj"][1] for c in (paper, released)]
    assert widths == [22688, 22656]


@pytest.mark.parametrize(
    ("name", "millions"), [("llama-30m", 30), ("llama-50m", 50), ("llama-100m", 100), ("llama-200m", 200)]
)
def test_small_llamas_have_the_size_of_their_name_in_their_blocks(name, millions):
    assert in_blocks(parameter_count(load(name))) / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize(
    ("name", "keep", "blocks", "weights"),
    [
        ("nemotron-12b", KeepBF16(first=2, last=8), 16.1, 17.2),
        ("nemotron-12b-v2", KeepBF16(first=2, last=8), 16.1, 17.2),
        ("nemotron-12b-v2", KeepBF16(last=4), 6.5, 6.9),
        ("nemotron-12b-v2", KeepBF16(last=8), 12.9, 13.8),
        (
            "nemotron-12b",
            KeepBF16(first=1, last=2),
            4.8,
            5.0,
        ),  # the FP8 baseline: 2 x 168.6 + 209.7 of 10,970 M
        ("nemotron-8b", KeepBF16(last=8), 15.4, 16.3),
        ("transformer-1.2b", KeepBF16(last=8), 20.0, 20.0),  # four layers of two blocks
    ],
)
def test_shares_left_in_bf16(name, keep, blocks, weights):
    assert shares_in_bf16(name, keep) == (blocks, weights)


def test_the_recipe_of_the_paper_keeps_these_blocks():
    assert fp4repro.recipe("nvfp4").keep.blocks(62) == KeepBF16(first=2, last=8).blocks(62)


def test_the_released_12b_to_the_million():
    counts = parameter_count(load("nemotron-12b-v2"))
    assert counts["mamba.in_proj"] == 28 * 22656 * 5120
    assert round(sum(counts.values()) / 1e9, 3) == 12.310
    assert sum(parameter_count(load("transformer-1.2b")).values()) == 1_291_929_600  # arXiv 2609.02846
