"""NVFP4Muon: torch's direction in FP32, ROOT's clip, matched updates, a resume to the bit (T-C7, T-C8)."""

import io

import pytest
import torch
from torch import nn

from fp4repro.errors import Fp4ReproError
from fp4repro.fullstack.newton_schulz_study import cosine
from fp4repro.fullstack.tiny_lm import Setup
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.optim import NVFP4AdamW, NVFP4Muon, build_optimizer
from fp4repro.optim.muon import clip_to_quantile, soft_threshold
from fp4repro.recipes.optimizer import ADAMW, FIRST_MOMENT, NVFP4_ADAMW, NVFP4_MUON, OptimizerRecipe

pytestmark = pytest.mark.usefixtures("eager")
FP32_MUON = OptimizerRecipe(kind="muon", schedule="muon5", gemm="fp32", guard=0.0)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def muon(params, lr=1e-2, recipe=NVFP4_MUON, **options):
    return NVFP4Muon([{"params": params, "muon": True}], lr, recipe=recipe, **options)


# T-C7
@pytest.mark.parametrize("shape", [(64, 64), (64, 160), (160, 64)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_fp32_steps_have_the_direction_of_torchs_muon(shape, nesterov):
    start = torch.randn(shape, generator=draw())
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    a = muon([ours], recipe=FP32_MUON.replace(nesterov=nesterov), weight_decay=0.0)
    b = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.0, nesterov=nesterov)
    generator = draw(1)
    for _ in range(4):
        before = ours.detach().clone(), theirs.detach().clone()
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
        assert cosine(ours.detach() - before[0], theirs.detach() - before[1]) > 0.999


def test_updates_have_the_root_mean_square_of_adamws():
    for rms_of, within in (("actual", 1e-4), ("shape", 0.2)):
        p = nn.Parameter(torch.zeros(64, 160))
        p.grad = torch.randn(p.shape, generator=draw())
        muon([p], 1.0, NVFP4_MUON.replace(rms_of=rms_of), weight_decay=0.0).step()
        assert float(p.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=within)


def test_weight_decay_is_decoupled():
    p = nn.Parameter(torch.ones(64, 64))
    p.grad = torch.zeros_like(p)
    muon([p], 0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((64, 64), 0.95))


# T-C8
def test_the_clip_is_the_matrix_less_its_soft_threshold():
    m = torch.randn(64, 96, generator=draw())
    at = torch.quantile(m.abs().double(), 0.9, interpolation="lower").float()
    clipped = clip_to_quantile(m, 0.9)
    largest = clipped.abs().max()
    torch.testing.assert_close(clipped, m.clamp(-largest, largest))
    torch.testing.assert_close(clipped, m - soft_threshold(m, largest), rtol=0, atol=1e-6)
    assert largest == pytest.approx(float(at), rel=0.01)
    assert ((clipped != m).float().mean() - 0.1).abs() < 0.01


def test_watched_updates_tell_a_blown_up_iteration_from_a_good_one():
    generator = draw()
    gradient = torch.randn(256, 256, generator=generator)
    found = {}
    for schedule in ("muon5", "muon3c3"):
        p = nn.Parameter(torch.zeros(256, 256))
        p.grad = gradient.clone()
        optimizer = muon([p], recipe=NVFP4_MUON.replace(schedule=schedule, guard=0.0), watch=True)
        optimizer.step()
        (found[schedule],) = optimizer.updates
    good, naive = found["muon3c3"], found["muon5"]
    assert good.cosine > 0.97 and abs(good.rms / good.rms_fp32 - 1) < 0.03
    assert naive.cosine < 0.7 and naive.rms > 1.2 * naive.rms_fp32
    assert good.name == "parameter 0"


def tiny() -> HybridModel:
    config = ModelConfig("*-", 64, 128, ffn_width=128, query_heads=2, kv_heads=2, head_dim=32)
    return HybridModel(config, draw())


def test_hidden_matrices_go_to_muon_and_the_rest_to_adamw():
    model = tiny()
    optimizer = build_optimizer(model, NVFP4_MUON, Setup())
    assert isinstance(optimizer, NVFP4Muon)
    by_muon = [n for g in optimizer.param_groups if g["muon"] for n in g["param_names"]]
    others = [n for g in optimizer.param_groups if not g["muon"] for n in g["param_names"]]
    assert len(by_muon) == 6 and all(n.startswith("blocks.") for n in by_muon)
    assert {"embedding.weight", "head.weight", "norm.weight"} < set(others)
    assert sorted(by_muon + others) == sorted(name for name, _ in model.named_parameters())
    decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}
    assert decays["head.weight"] == 0.1 and decays["embedding.weight"] == decays["norm.weight"] == 0.0


def test_a_recipe_of_plain_adamw_builds_torchs_own():
    assert type(build_optimizer(tiny(), ADAMW, Setup())) is torch.optim.AdamW
    assert type(build_optimizer(tiny(), NVFP4_ADAMW, Setup())) is NVFP4AdamW


def _trained(recipe: OptimizerRecipe, steps: int, resume: int | None = None):
    model = tiny()
    optimizer = build_optimizer(model, recipe, Setup())
    tokens = torch.randint(128, (steps, 4, 33), generator=draw(1))
    for step in range(steps):
        if step == resume:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            model = tiny()
            optimizer = build_optimizer(model, recipe, Setup())
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        optimizer.zero_grad()
        model(tokens[step, :, :-1], tokens[step, :, 1:]).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4_ADAMW,
        NVFP4_MUON,
        NVFP4_MUON.replace(first=None, schedule="muon5", clip_quantile=0.9, last_step_bf16=True),
        NVFP4_MUON.replace(first=FIRST_MOMENT.replace(rounding="stochastic")),
    ],
    ids=["adamw", "muon", "root-fp32-momentum", "muon-stochastic"],
)
def test_a_resumed_run_ends_with_the_same_bits(recipe):
    (whole, a), (resumed, b) = _trained(recipe, 4), _trained(recipe, 4, resume=2)
    assert all(torch.equal(x, y) for x, y in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert not torch.equal(next(whole.parameters()), next(tiny().parameters()))
    if isinstance(a, NVFP4Muon):
        assert a.guard_hits == b.guard_hits
        momentum = [s["momentum"] for s in b.state.values() if "momentum" in s]
        assert {tuple(m) for m in momentum} == {
            ("values",) if recipe.first is None else ("codes", "scales", "amax")
        }


def test_vectors_and_unknown_settings_are_refused():
    with pytest.raises(Fp4ReproError, match=r"Muon takes matrices.*shape \(64,\)"):
        muon([nn.Parameter(torch.zeros(64))])
    with pytest.raises(Fp4ReproError, match="no Newton-Schulz schedule is named 'muon9'"):
        muon([nn.Parameter(torch.zeros(64, 64))], recipe=NVFP4_MUON.replace(schedule="muon9"))
    with pytest.raises(Fp4ReproError, match="the optimizer has no field 'scedule'; it has kind"):
        NVFP4_MUON.replace(scedule="muon5")
    with pytest.raises(Fp4ReproError, match="kind is 'sgd', not adamw or muon"):
        OptimizerRecipe(kind="sgd")
    with pytest.raises(Fp4ReproError, match="first moment has signs"):
        OptimizerRecipe(first=FIRST_MOMENT.replace(signed=False))
