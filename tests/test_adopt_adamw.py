"""A BF16 trunk's AdamW states in 4-bit optimizers: encoded as stored, steps counted on, the wrong refused."""

import copy

import pytest
import torch

import fp4repro
from fp4repro.errors import Fp4ReproError
from fp4repro.fullstack.optimizer_states import through
from fp4repro.fullstack.tiny_lm import Setup
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.optim import adopt_adamw, build_optimizer
from fp4repro.optim.codecs import decode_matrix
from fp4repro.recipes.optimizer import ADAMW, FIRST_MOMENT, NVFP4_ADAMW, NVFP4_MUON

pytestmark = pytest.mark.usefixtures("eager")


def tiny() -> HybridModel:
    config = ModelConfig("*-", 64, 128, ffn_width=128, query_heads=2, kv_heads=2, head_dim=32)
    return HybridModel(config, torch.Generator().manual_seed(0))


def train(model, optimizer, steps, start=0):
    tokens = torch.randint(128, (8, 4, 33), generator=torch.Generator().manual_seed(1))
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(tokens[step, :, :-1], tokens[step, :, 1:]).backward()
        optimizer.step()


@pytest.fixture
def trunk():
    model = tiny()
    optimizer = build_optimizer(model, ADAMW, Setup())
    train(model, optimizer, 3)
    return model, optimizer


def branch(trunk, recipe):
    model = tiny()
    model.load_state_dict(trunk[0].state_dict())
    optimizer = build_optimizer(model, recipe, Setup())
    adopt_adamw(optimizer, model, copy.deepcopy(trunk[1].state_dict()))
    return model, optimizer


def test_moments_are_what_the_codecs_make_of_them(trunk):
    model, optimizer = branch(trunk, NVFP4_ADAMW)
    coded = 0
    for ours, theirs in zip(model.parameters(), trunk[0].parameters(), strict=True):
        state, reference = optimizer.state[ours], trunk[1].state[theirs]
        assert int(state["step"]) == 3
        for moment, codec in zip(("exp_avg", "exp_avg_sq"), optimizer.codecs, strict=True):
            if isinstance(state[moment], torch.Tensor):
                assert torch.equal(state[moment], reference[moment])
                assert state[moment].data_ptr() != reference[moment].data_ptr()
            else:
                coded += 1
                got = decode_matrix(state[moment], codec, ours.shape)
                assert torch.equal(got, through(reference[moment], codec))
                error = (got - reference[moment]).norm() / reference[moment].norm()
                assert 0.01 < error < 0.2
        if not isinstance(state["exp_avg"], torch.Tensor):
            expected = fp4repro.quantize(reference["exp_avg"], fp4repro.NVFP4)
            assert torch.equal(optimizer.stored(ours, "exp_avg").codes, expected.codes)
    assert coded >= 12
    assert {key for key in optimizer.state} == set(model.parameters())


@pytest.mark.parametrize("recipe", [NVFP4_ADAMW, NVFP4_MUON, ADAMW], ids=["adamw", "muon", "fp32"])
def test_a_branch_goes_on_from_the_trunk(trunk, recipe):
    """It counts on, falls as the trunk does, and where nothing is coded it is the trunk to the bit."""
    model, optimizer = branch(trunk, recipe)
    train(model, optimizer, 3, start=3)
    train(*trunk, 3, start=3)
    pairs = list(zip(model.parameters(), trunk[0].parameters(), strict=True))
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}
    if recipe is ADAMW:
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    elif recipe is NVFP4_ADAMW:
        start = dict(zip(model.parameters(), tiny().parameters(), strict=True))
        moved = sum((theirs - start[ours]).norm() ** 2 for ours, theirs in pairs) ** 0.5
        apart = sum((theirs - ours).norm() ** 2 for ours, theirs in pairs) ** 0.5
        assert 0 < apart < 0.15 * moved


def test_fp32_moments_of_a_4_bit_optimizer_continue_to_the_bit(trunk):
    """A first moment alone coded: the second, kept in FP32, is the trunk's own."""
    model, optimizer = branch(trunk, NVFP4_ADAMW.replace(second=None))
    p, q = model.head.weight, trunk[0].head.weight
    values = optimizer.state[p]["exp_avg_sq"]["values"]
    assert torch.equal(values.view(q.shape), trunk[1].state[q]["exp_avg_sq"])
    before = trunk[1].state[q]["exp_avg_sq"].clone()
    train(model, optimizer, 1, start=3)
    assert torch.equal(before, trunk[1].state[q]["exp_avg_sq"])  # not written to by the branch


def test_muons_momentum_is_the_first_moment(trunk):
    model, optimizer = branch(trunk, NVFP4_MUON.replace(first=None))
    theirs = dict(trunk[0].named_parameters())
    names = [n for group in optimizer.param_groups if group["muon"] for n in group["param_names"]]
    assert len(names) == 6
    for name in names:
        state = optimizer.state[model.get_parameter(name)]
        assert torch.equal(state["momentum"]["values"], trunk[1].state[theirs[name]]["exp_avg"])
        assert state["step"] == 3


def test_stochastic_states_are_drawn_by_the_runs_seed(trunk):
    recipe = NVFP4_ADAMW.replace(first=FIRST_MOMENT.replace(rounding="stochastic"))
    codes = []
    for _ in range(2):
        model, optimizer = branch(trunk, recipe)
        codes.append(optimizer.state[model.head.weight]["exp_avg"]["codes"])
    nearest_model, nearest = branch(trunk, NVFP4_ADAMW)
    assert torch.equal(*codes)
    assert not torch.equal(codes[0], nearest.state[nearest_model.head.weight]["exp_avg"]["codes"])


def test_other_states_are_refused(trunk):
    model, optimizer = branch(trunk, NVFP4_ADAMW)
    with pytest.raises(Fp4ReproError, match="has no float32 exp_avg of shape"):
        adopt_adamw(optimizer, model, optimizer.state_dict())
    state = trunk[1].state_dict()
    state["param_groups"] = state["param_groups"][:1]
    with pytest.raises(Fp4ReproError, match=r"state is of \d+ parameters, but the model has"):
        adopt_adamw(optimizer, model, state)
