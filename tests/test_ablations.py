"""The ablations as data: what each entry becomes, and what is refused with a sentence."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import fp4repro
from fp4repro.ablations import ABLATIONS, format_of, load_ablations
from fp4repro.config import load_scale
from fp4repro.core.formats import NVFP4
from fp4repro.errors import Fp4ReproError
from fp4repro.recipes import SLOTS, KeepBF16, LateBF16, recipe
from fp4repro.report.plan import plans
from fp4repro.report.published import load_published
from fp4repro.schemas import read_yaml

ROOT = Path(__file__).parents[1]
SCALES = ROOT / "configs" / "scales"
ENTRIES = load_ablations()


def changed_fields(name):
    """Fields in which an entry's recipe differs from its base's."""
    entry = ENTRIES[name]
    base = ENTRIES[entry.base].recipe if entry.base in ENTRIES else recipe(entry.base)
    ours = entry.recipe
    return {
        field.name: getattr(ours, field.name)
        for field in dataclasses.fields(ours)
        if field.name != "name" and getattr(ours, field.name) != getattr(base, field.name)
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_sr", {"stochastic": ()}),
        ("no_rht", {"hadamard": ()}),
        ("no_2d", {"w_fprop": NVFP4, "w_dgrad": NVFP4}),
        ("no_bf16_layers", {"keep": KeepBF16()}),
        ("one_dim", {"w_fprop": NVFP4, "w_dgrad": NVFP4.with_block(16, 1)}),
        ("x_only_one_dim", {"x_wgrad": NVFP4.with_block(16, 1)}),
        ("late_forward", {"late_bf16": LateBF16(0.82, ("fprop",))}),
        ("mxfp4_136", {}),
        ("nvfp4", {}),
    ],
)
def test_an_entry_replaces_what_it_says_and_nothing_else(name, expected):
    assert changed_fields(name) == expected


def test_only_nothing_applied_and_single_operands_change_more_than_two_parts():
    document = read_yaml(ABLATIONS)
    many = {name for name, entry in document.items() if len(entry.get("replace", {})) > 2}
    assert many == {"plain", "w_only", "x_only", "trend_short"}


@pytest.mark.parametrize(
    ("last", "parts"),
    [("no_bf16_layers", ["add_sr", "add_sr_rht"]), ("no_sr", ["add_bf16_layers", "add_bf16_layers_2d"])],
)
def test_adding_parts_one_by_one_ends_at_the_whole_recipe(last, parts):
    """Each step is one part nearer to the whole recipe, which is one part from the last step."""
    groups = ({"stochastic"}, {"hadamard"}, {"w_fprop", "w_dgrad"}, {"keep"})

    def missing(name):
        pairs = dataclasses.asdict(ENTRIES[name].recipe), dataclasses.asdict(recipe("nvfp4"))
        return sum(any(pairs[0][field] != pairs[1][field] for field in group) for group in groups)

    assert [missing(name) for name in ("plain", *parts, last, "nvfp4")] == [4, 3, 2, 1, 0]


def test_one_direction_is_one_weight_and_two_directions_are_two():
    weights = {}
    for name in ("nvfp4", "one_dim", "no_2d", "w_only_1d"):
        torch.manual_seed(0)
        layer = nn.Linear(64, 32, bias=False)
        with torch.no_grad():
            layer.weight *= torch.logspace(-2, 2, 64)
        fp4repro.convert(layer, ENTRIES[name].recipe.replace(keep=KeepBF16()))
        loaded = [layer.quantised_weight(slot).dequantize() for slot in ("w_fprop", "w_dgrad")]
        weights[name] = torch.equal(*loaded)
    assert weights == {"nvfp4": True, "one_dim": True, "no_2d": False, "w_only_1d": False}


def test_a_late_switch_takes_operands_and_transform_of_its_products():
    for name, products in (("late_all", {"fprop", "dgrad", "wgrad"}), ("late_backward", {"dgrad", "wgrad"})):
        early, late = (ENTRIES[name].recipe.at(done) for done in (0.8199, 0.82))
        assert early == ENTRIES[name].recipe
        for slot in SLOTS:
            gone = getattr(late, slot) is None
            assert gone == (slot.split("_")[1] in products), slot
        assert late.hadamard == ()
    assert not ENTRIES["late_all"].recipe.at(1.0).quantises
    assert ENTRIES["late_forward"].recipe.at(0.9).hadamard == ("wgrad",)


def test_every_claim_with_a_number_names_a_published_one():
    known = {entry.id for entry in load_published(ROOT / "configs" / "published.yaml")}
    named = {claim.published for entry in ENTRIES.values() for claim in entry.claims} - {None}
    assert len(named) >= 5 and named <= known
    assert sum(bool(entry.claims) for entry in ENTRIES.values()) > 30


@pytest.mark.parametrize(
    ("value", "block"), [("nvfp4", (1, 16)), ("nvfp4-16x16", (16, 16)), ("mxfp4-32x32", (32, 32))]
)
def test_formats_by_name(value, block):
    assert format_of(value).block == block
    assert format_of({"format": value, "target": 5.5}) == format_of(value).replace(target=5.5)


GOOD = {"group": "g", "base": "nvfp4", "replace": {"hadamard_size": 8}}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"a": GOOD | {"replace": {"hadamrd": []}}}, "a: recipe nvfp4 has no field 'hadamrd'; it has name"),
        ({"a": GOOD | {"replace": {"hadamard_size": 16}}}, "a: equals its base nvfp4"),
        ({"a": GOOD, "b": GOOD}, "b: has the same settings as a"),
        ({"a": GOOD | {"base": "nvfp5"}}, "a: no recipe and no entry above is named 'nvfp5'; did you"),
        ({"b": GOOD | {"base": "a"}, "a": GOOD}, "b: no recipe and no entry above is named 'a'"),
        ({"a": GOOD | {"replace": {"weights": "nvfp5"}}}, "a: no format is named 'nvfp5'; known: nvfp4"),
        ({"a": GOOD | {"replace": {"weights": {"format": "nvfp4", "tarjet": 5}}}}, "a format has no field"),
        ({"a": GOOD | {"replace": {"stochastic": "dy_dgrad"}}}, "cannot be 'dy_dgrad': it takes a list"),
        ({"a": GOOD | {"replace": {"late_bf16": {"after": "x"}}}}, "after cannot be 'x': it takes a number"),
        ({"a": GOOD | {"replace": {"keep": 3}}}, "keep cannot be 3: it takes fields"),
        ({"a": GOOD | {"replace": {"keep": {"las": 4}}}}, "a: keep has no 'las'; it has first, last"),
        ({"a": GOOD | {"replace": {"late_bf16": {"after": 2}}}}, "a: LateBF16(after=2, products="),
        ({"a": GOOD | {"replace": {"stochastic": ["dy"]}}}, "stochastic names 'dy', which is none of"),
        ({"mxfp4": GOOD}, "mxfp4: is the name of a recipe: base must be mxfp4"),
        ({"a": GOOD | {"base": "mxfp4", "replace": {"weights": "mxfp4-32x32"}}}, "a: equals its base"),
        ({"a": GOOD | {"replace": {"name": "b", "keep": {"first": 2, "last": 8, "of": 62}}}}, "equals its"),
        ({"a": GOOD | {"bas": 1}}, "unknown key 'bas' in a; did you mean 'base'?"),
        ({"a": {"group": "g"}}, "a lacks the key 'base'"),
        ({"a": GOOD | {"baseline": "bf61"}}, "a: no recipe and no entry above is named 'bf61'"),
        (
            {"a": GOOD | {"claims": [{"says": "s", "where": "w", "expect": "worse", "than": "b"}]}},
            "a: no recipe and no entry above is named 'b'",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(tmp_path, document, said):
    path = tmp_path / "ablations.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(Fp4ReproError) as caught:
        load_ablations(path)
    message = str(caught.value)
    assert said in message and message.startswith(str(path)) and "\n" not in message


def test_two_ways_to_the_settings_of_another_recipe_are_refused(tmp_path):
    """By other fields, one after the other, back to the whole recipe."""
    document = {"a": GOOD, "b": {"group": "g", "base": "a", "replace": {"hadamard_size": 16}}}
    path = tmp_path / "ablations.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(Fp4ReproError, match="b: has the same settings as the recipe nvfp4"):
        load_ablations(path)


# Scales


def scale_with(tmp_path, **section):
    document = yaml.safe_load((SCALES / "smoke.yaml").read_text()) | {"ablations": section}
    path = tmp_path / "smoke.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"scratch": ["no_rth"]}, "ablations.scratch: configs/ablations.yaml has no entry 'no_rth'; did you"),
        ({"branches": ["late_all"]}, "ablations.branches: late_all changes the run itself"),
        ({"branches": ["no_sr"], "branch_from": 0.9}, "branch_from = 0.9 is step 36, but branches leave"),
        ({"branches": ["no_sr"], "branch_from": 0.01}, "branch_from = 0.01 is step 0, but branches leave"),
        ({"branches": "some"}, "ablations.branches is 'some', not one of all"),
    ],
)
def test_a_mistake_in_a_scale_is_one_sentence(tmp_path, section, said):
    with pytest.raises(Fp4ReproError) as caught:
        load_scale(scale_with(tmp_path, **section))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_all_is_every_entry_that_the_protocol_can_hold(tmp_path):
    plan = load_scale(scale_with(tmp_path, scratch="all", branches="all")).ablations
    assert set(plan.scratch) == set(ENTRIES)
    assert set(plan.scratch) - set(plan.branches) == {
        *(name for name in ENTRIES if name.startswith(("late_", "trend_"))),
        *("mxfp4_125", "mxfp4_136", "mxfp4_150"),
    }


@pytest.mark.parametrize("scale", ["smoke", "overnight"])
def test_smoke_and_overnight_plan_every_entry(scale):
    planned = {name for plan in plans(load_scale(SCALES / f"{scale}.yaml"), ENTRIES) for name in plan.names}
    assert set(ENTRIES) <= planned


def test_a_plan_trains_once_what_comes_to_the_same_run(tmp_path):
    scale = load_scale(scale_with(tmp_path, branches=["no_bf16_layers", "last_4", "keep_last"]))
    (plan,) = plans(scale, ENTRIES)
    assert plan.alias == {"last_4": "no_bf16_layers"}  # 4 of 62 are 0.4 of 6 blocks
    assert plan.folder("last_4", 3) == "branches/no_bf16_layers/seed-3"
    assert len(plan.folders()) == 3  # bf16 too
    deep = dataclasses.replace(scale, model="nemotron-12b")
    assert plans(deep, ENTRIES)[0].alias == {}


def test_baselines_from_scratch_are_the_pretraining_runs(tmp_path):
    path = scale_with(tmp_path, scratch=["late_all", "trend_short", "mxfp4"], scratch_seeds=[1])
    (plan,) = plans(load_scale(path), ENTRIES)
    assert set(plan.folders()) == {
        *("pretrain/bf16/seed-1", "pretrain/mxfp4/seed-1", "pretrain/fp8/seed-1", "pretrain/nvfp4/seed-1"),
        *("ablations/late_all/seed-1", "ablations/trend_short/seed-1", "ablations/trend_short_bf16/seed-1"),
    }
