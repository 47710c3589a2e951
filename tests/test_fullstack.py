"""Full-Stack FP4 as entries: what is parsed and refused, what a scale plans, and every module off."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import fp4repro
from fp4repro.ablations import ABLATIONS, FULLSTACK, load_ablations, load_entries
from fp4repro.attention import fp4_attention
from fp4repro.config import load_scale
from fp4repro.data.tokens import TokenData
from fp4repro.errors import Fp4ReproError
from fp4repro.models import ModelConfig
from fp4repro.optim import NVFP4AdamW, NVFP4Muon
from fp4repro.recipes import AttentionRecipe, LoraSVD, recipe, recipe_names
from fp4repro.recipes.optimizer import FIRST_MOMENT, SECOND_MOMENT
from fp4repro.report import fullstack as table
from fp4repro.report.plan import BRANCHES, SCRATCH, plans
from fp4repro.report.published import load_published
from fp4repro.train.checkpoint import save_checkpoint
from fp4repro.train.evaluate import held_out
from fp4repro.train.held import optimizer_bytes
from fp4repro.train.job import Job, Trunk
from fp4repro.train.protocols import scale_of

ROOT = Path(__file__).parents[1]
SCALES = ROOT / "configs" / "scales"
ENTRIES = load_ablations(FULLSTACK)
pytestmark = pytest.mark.usefixtures("eager")


# Entries


def test_modules_become_fields_of_the_recipe():
    full = ENTRIES["full_stack"].recipe
    assert full.lora_svd == LoraSVD(rank=8) and full.attention == AttentionRecipe()
    assert (full.optimizer.first, full.optimizer.second) == (FIRST_MOMENT, SECOND_MOMENT)
    assert full.same_as(recipe("full-stack-fp4").replace(lora_svd=LoraSVD(rank=8)))
    assert ENTRIES["attention_pv"].recipe.attention.lowered == (*AttentionRecipe().lowered, "pv")
    assert not ENTRIES["attention"].recipe.quantises and ENTRIES["optimizer"].recipe.attention is None


def test_orders_add_one_module_a_step():
    def modules(name):
        ours = ENTRIES[name].recipe
        found = {"projections": ours.lora_svd, "attention": ours.attention}
        return {k for k, v in found.items() if v} | ({"optimizer"} if ours.optimizer.first else set())

    assert [modules(name) for name in table.SINGLES] == [{name} for name in table.SINGLES]
    for order in table.ORDERS:
        assert [len(modules(name)) for name in order] == [1, 2, 3]
        assert all(modules(a) < modules(b) for a, b in pairwise(order))
    assert modules("muon_full_stack") == modules("full_stack")


def test_each_muon_entry_is_against_muon_in_fp32():
    for name, entry in ENTRIES.items():
        muon = entry.recipe.optimizer.kind == "muon"
        assert entry.baseline == ("muon_base" if muon and name != "muon_base" else "bf16")
        assert bool(entry.only_whole) == (muon or name == "trained_factors")


def test_claims_with_a_number_name_a_published_one():
    known = {figure.id for figure in load_published(ROOT / "configs" / "published.yaml")}
    named = {claim.published for entry in ENTRIES.values() for claim in entry.claims} - {None}
    assert len(named) >= 5 and named <= known


@pytest.mark.parametrize(
    ("replace", "said"),
    [
        ({"optimizer": {"kind": "adam"}}, "optimizer: kind is 'adam', not adamw or muon"),
        ({"optimizer": {"first": {"signde": True}}}, "optimizer.first has no 'signde'; it has format"),
        ({"optimizer": {"first": {"signed": False}}}, "the first moment has signs"),
        ({"optimizer": {"second": {"map": "root"}}}, "a state's map 'root' must be one of"),
        ({"attention": {"lowered": ["pvx"]}}, "lowered names 'pvx', which is none of"),
        ({"attention": {"format": "nvfp5"}}, "no format is named 'nvfp5'"),
        ({"lora_svd": {"rank": -1}}, "lora_svd: rank must be an integer from 0 up"),
    ],
)
def test_a_mistake_in_a_module_is_one_sentence(tmp_path, replace, said):
    path = tmp_path / "fullstack.yaml"
    path.write_text(yaml.safe_dump({"a": {"group": "g", "base": "four-over-six", "replace": replace}}))
    with pytest.raises(Fp4ReproError) as caught:
        load_ablations(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_both_files_are_one_list_and_only_a_recipe_may_be_in_both(tmp_path):
    every = load_entries()
    assert set(every) == set(ENTRIES) | set(load_ablations(ABLATIONS))
    path = tmp_path / "fullstack.yaml"
    entry = {"group": "g", "base": "nvfp4", "replace": {"hadamard_size": 8}}
    path.write_text(yaml.safe_dump({"no_sr": entry}))
    with pytest.raises(Fp4ReproError, match=r"no_sr is an entry of .*ablations.yaml already"):
        load_entries(fullstack=path)


# Scales


def scale_with(tmp_path, **section):
    document = yaml.safe_load((SCALES / "smoke.yaml").read_text()) | {"fullstack": section}
    path = tmp_path / "smoke.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"scratch": ["projection"]}, "fullstack.scratch: configs/fullstack.yaml has no entry 'projection'"),
        ({"branches": ["muon_base"]}, "fullstack.branches: muon_base trains with muon, whose states"),
        ({"branches": ["trained_factors"]}, "trained_factors trains factors beside W"),
        ({"training": {"token": 5}}, "fullstack.training: unknown key 'token' in the file; did you mean"),
        ({"training": {"tokens": 5}}, "training.tokens = 5 is less than one batch"),
        ({"model": "tinny"}, "there is no model 'tinny' in configs/models"),
    ],
)
def test_a_mistake_in_a_scale_is_one_sentence(tmp_path, section, said):
    with pytest.raises(Fp4ReproError) as caught:
        load_scale(scale_with(tmp_path, **section))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_baseline_is_the_pretraining_run_unless_the_run_is_another(tmp_path):
    section = {"scratch": ["projections", "muon_3c3"], "scratch_seeds": [1]}
    (plan,) = plans(load_scale(scale_with(tmp_path, **section)), ENTRIES, "fullstack")
    assert plan.folders() == [
        *("pretrain/bf16/seed-1", "fullstack/muon_base/seed-1", "fullstack/projections/seed-1"),
        "fullstack/muon_3c3/seed-1",
    ]
    scale = load_scale(scale_with(tmp_path, training={"tokens": 2_048}, model="llama-tiny", **section))
    (plan,) = plans(scale, ENTRIES, "fullstack")
    assert plan.folders()[0] == "fullstack/bf16/seed-1"
    taken = scale_of(scale, "fullstack", ENTRIES["projections"])
    assert (taken.model, taken.training.steps, taken.training.batch) == ("llama-tiny", 2, 8)
    assert scale_of(scale, "pretrain").training.steps == 40


def test_branches_share_the_trunks_of_the_ablations():
    (plan,) = plans(load_scale(SCALES / "laptop.yaml"), ENTRIES, "fullstack")
    assert plan.protocol == BRANCHES and plan.alias == {}
    assert "branches/bf16/seed-2" in plan.folders() and "branches/full_stack/seed-4" in plan.folders()


def test_overnight_trains_every_entry_and_smoke_every_kind():
    (overnight,) = plans(load_scale(SCALES / "overnight.yaml"), ENTRIES, "fullstack")
    assert overnight.protocol == SCRATCH and set(overnight.entries) == set(ENTRIES)
    smoke = {n for plan in plans(load_scale(SCALES / "smoke.yaml"), ENTRIES, "fullstack") for n in plan.names}
    assert {ENTRIES[name].group for name in smoke & set(ENTRIES)} == {e.group for e in ENTRIES.values()}
    assert smoke >= {*table.SINGLES, *(name for order in table.ORDERS for name in order)}


# Runs


@pytest.fixture
def job():
    """A run of a model with one block of each kind that a module changes."""
    scale = load_scale(SCALES / "smoke.yaml")
    training = dataclasses.replace(
        scale.training, tokens=1024, batch=4, context=32, validation_tokens=256, warmup_fraction=0.25
    )
    scale = dataclasses.replace(
        scale, training=training, ablations=dataclasses.replace(scale.ablations, branch_steps=2)
    )
    model = ModelConfig("*-*-", 64, 64, ffn_width=128, query_heads=2, kv_heads=2, head_dim=32)
    tokens = (np.arange(4000) * 7 % 61 % 64).astype(np.uint16)
    data = TokenData(tokens[:3000], tokens[3000:], np.ones(64, dtype=np.int64), {})
    return Job(scale, model, recipe("bf16"), 0, data, torch.device("cpu"))


def finish(job):
    run = job.begin()
    run.train(job.batches, held_out(job.data, run.settings), lambda: None)
    return run


def test_every_module_off_is_plain_training_to_the_bit(job):
    off = {
        "lora_svd": LoraSVD(rank=0),
        "attention": AttentionRecipe(lowered=(), views=(), high="operands"),
        "optimizer": ENTRIES["optimizer"].recipe.optimizer.replace(first=None, second=None),
    }
    plain = finish(job)
    assert plain.step == 8
    changed = {name: ENTRIES[name].recipe for name in table.SINGLES}
    for name, ours in [
        *((f"{field} off", job.recipe.replace(**{field: value})) for field, value in off.items()),
        ("all off", job.recipe.replace(**off)),
        *changed.items(),
    ]:
        run = finish(dataclasses.replace(job, recipe=ours))
        same = run.curve == plain.curve and all(
            torch.equal(a, b) for a, b in zip(run.model.parameters(), plain.model.parameters(), strict=True)
        )
        assert same == name.endswith("off"), name


@pytest.fixture
def trunk(job, tmp_path):
    trunk = dataclasses.replace(job, scale=scale_of(job.scale, "trunk"), protocol="trunk")
    save_checkpoint(tmp_path / "trunk.pt", trunk.settings(), finish(trunk).state())
    return Trunk(trunk, tmp_path / "trunk.pt")


def branch(job, trunk, name):
    scale, ours = scale_of(job.scale, "branches"), ENTRIES[name].recipe if name in ENTRIES else recipe(name)
    return dataclasses.replace(job, scale=scale, recipe=ours, protocol="branches", trunk=trunk)


def test_a_branch_that_changes_the_optimizer_goes_on_from_the_trunks_states(job, trunk):
    """Before its first step it holds the trunk's weights and moments, these in 4 bits, and the step count;
    its first loss is BF16's, since only the update after it differs."""
    plain, run = finish(branch(job, trunk, "bf16")), branch(job, trunk, "optimizer").begin()
    state = trunk.state()
    name = next(n for n, p in run.model.named_parameters() if p.ndim == 2 and p.numel() >= 4096)
    weight = run.model.get_parameter(name)
    assert torch.equal(weight, state["model"][name])
    assert run.optimizer.state[weight]["exp_avg_sq"]["codes"].dtype == torch.uint8
    assert run.optimizer.state[weight]["step"] == 4 == run.step
    run = finish(branch(job, trunk, "optimizer"))
    sizes = [(p.numel(), p.ndim) for p in run.model.parameters()]
    expected = sum(n * 10 // 8 + 8 if d == 2 and n >= 4096 else 8 * n + 4 for n, d in sizes)  # amax, step
    assert optimizer_bytes(run.optimizer) == expected < optimizer_bytes(plain.optimizer) / 4
    losses = [r.column("train_loss") for r in (run, plain)]
    assert losses[0][:5] == losses[1][:5] and losses[0][5] != losses[1][5]
    assert abs(losses[0][5] / losses[1][5] - 1) < 0.01
    fresh = dataclasses.replace(branch(job, trunk, "optimizer"), trunk=None).begin()
    assert not fresh.optimizer.state  # what adopting has to be told from


def test_every_entry_that_may_branch_does(job, trunk):
    for name in ("full_stack", "protected_wgrad"):
        run = finish(branch(job, trunk, name))
        assert run.step == 6 and not run.diverged


# What is refused, or kept as it is, one sentence each


def test_sentences():
    q = torch.zeros(1, 1, 32, 24)
    bias, table_ = nn.Parameter(torch.zeros(8192)), nn.Embedding(256, 64, sparse=True)
    table_(torch.tensor([1])).sum().backward()
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
    causal = torch.ones(32, 32, dtype=torch.bool)
    wide = recipe("nvfp4-lora-svd").replace(keep=fp4repro.KeepBF16(), lora_svd=LoraSVD(rank=33))
    for attempt, said in (
        (
            lambda: fp4_attention(q, q, q, AttentionRecipe()),
            "the head_dim of q and k is 24, but must be",
        ),
        (lambda: NVFP4Muon([{"params": [bias], "muon": True}]), "Muon takes matrices, but a parameter"),
        (lambda: NVFP4AdamW(table_.parameters()).step(), "is sparse, which 4-bit states cannot follow"),
        (
            lambda: fp4_attention(*[torch.zeros(1, 1, 32, 32)] * 3, AttentionRecipe(), causal=causal),
            "causal must be True or False, not Tensor: attention in tiles has no other mask",
        ),
        (lambda: fp4repro.convert(layers, wide), "rank 33 is above the width"),
    ):
        with pytest.raises(Fp4ReproError) as caught:
            attempt()
        assert said in str(caught.value) and "\n" not in str(caught.value)
    assert NVFP4AdamW([("bias", bias)]).kept == {"bias": "has 1 axes, not 2"}


def test_names_of_recipes_stay_recipes():
    assert {name for name in ENTRIES if name in recipe_names()} == {"nvfp4", "four-over-six"}
