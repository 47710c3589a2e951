"""An FP32 AdamW's state taken over by another optimizer, so that a branch of a BF16 trunk can change it.

The moments are encoded as the optimizer would have stored them after its own step, and step counts go on.
A matrix that Muon takes keeps the first moment as its momentum: both are running means of the gradient
(beta1 against mu), and Newton-Schulz does not see the scale. Its second moment has no successor.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fp4repro.core.random import RandomKey
from fp4repro.errors import Fp4ReproError
from fp4repro.optim.adamw import parameter_groups
from fp4repro.optim.buckets import MOMENTS
from fp4repro.optim.codecs import encode_matrix
from fp4repro.optim.muon import MOMENTUM, NVFP4Muon
from fp4repro.optim.nvfp4_adamw import NVFP4AdamW, why_fp32
from fp4repro.optim.shards import groups_of, local


@torch.no_grad()
def adopt_adamw(optimizer: torch.optim.Optimizer, model: nn.Module, state_dict: dict) -> None:
    """Give `optimizer` (of `build_optimizer`) the states in `state_dict`, of `adamw` on the same model.

    Learning rates, betas and decays stay the optimizer's own. Raises if the states are not FP32 AdamW's or
    are of other parameters.
    """
    if not isinstance(optimizer, NVFP4AdamW):
        optimizer.load_state_dict(state_dict)
        return
    names = {id(p): name for name, p in model.named_parameters()}
    params = [p for group in parameter_groups(model, 0.0) for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(numbers) != len(params):
        raise Fp4ReproError(
            f"the state is of {len(numbers)} parameters, but the model has {len(params)}: adopt the state of "
            "an AdamW of the same model"
        )
    found = {}
    for p, number in zip(params, numbers, strict=True):
        if number in state_dict["state"]:
            found[p] = _checked(state_dict["state"][number], p, names[id(p)])
    muon = set(_muon_params(optimizer))
    optimizer.state.clear()
    for layer, (p, state) in enumerate(found.items()):
        key = RandomKey(optimizer.seed, int(state["step"]), layer)
        if id(p) in muon:
            momentum = optimizer.store_momentum(local(state["exp_avg"]).clone(), p, key)
            optimizer.state[p] = {"step": int(state["step"]), MOMENTUM: momentum}
        else:
            optimizer.state[p] = _coded(optimizer, p, state, key)
    optimizer.forget_buckets()


def _checked(state: dict, p: Tensor, name: str) -> dict:
    for moment in MOMENTS:
        value = state.get(moment)
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.shape != p.shape:
            raise Fp4ReproError(
                f"the state of {name} has no float32 {moment} of shape {tuple(p.shape)}: adopt the state of "
                "an FP32 AdamW of the same model"
            )
    return state


def _muon_params(optimizer: NVFP4AdamW) -> Iterable[int]:
    if isinstance(optimizer, NVFP4Muon):
        yield from (id(p) for group in optimizer.param_groups if group["muon"] for p in group["params"])


def _coded(optimizer: NVFP4AdamW, p: Tensor, state: dict, key: RandomKey) -> dict:
    if why_fp32(p, optimizer.codecs):
        moments = {moment: state[moment].clone().to(p.device) for moment in MOMENTS}
        return {"step": torch.as_tensor(float(state["step"])), **moments}
    coded = {"step": int(state["step"])}
    for role, (moment, codec) in enumerate(zip(MOMENTS, optimizer.codecs, strict=True)):
        value = local(state[moment]).to(local(p).device)
        noise = RandomKey(key.seed, key.step, key.layer, role).tensor(value.device)
        coded[moment] = encode_matrix(value, codec, noise, groups_of(p))
    return coded
