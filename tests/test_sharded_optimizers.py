"""Two gloo ranks with FSDP2 against one process: the same parameters and states, to the bit."""

import os

import pytest
import torch
from torch import nn

from fp4repro.optim import NVFP4AdamW, NVFP4Muon
from fp4repro.recipes.optimizer import NVFP4_MUON

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch has no distributed package"
)
RANKS = 2


def model() -> nn.Module:
    """Rows that two ranks share evenly (96, 130) and unevenly (65)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 65), nn.Linear(65, 130, bias=False))


def optimizer_of(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return NVFP4AdamW(net.parameters(), 1e-2)
    muon = [p for p in net.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if p.ndim != 2]
    groups = [{"params": muon, "muon": True}, {"params": rest}]
    return NVFP4Muon(groups, 1e-2, recipe=NVFP4_MUON.replace(clip_quantile=0.9))


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(16, 128, generator=generator), torch.randn(16, 130, generator=generator)
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()


def on_a_rank(rank: int, folder: str) -> None:
    os.environ["FP4REPRO_COMPILE"] = "0"
    torch.set_num_threads(1)
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        found = {}
        for kind in ("adamw", "muon"):
            net = model()
            fully_shard(net, mesh=mesh)
            optimizer = optimizer_of(kind, net)
            train(net, optimizer)
            found[kind] = {name: p.full_tensor().detach() for name, p in net.named_parameters()}
            state = optimizer.state[net[0].weight]
            moment = state["exp_avg" if kind == "adamw" else "momentum"]
            found[f"{kind}-codes"] = moment["codes"].clone()
            found[f"{kind}-amax"] = moment["amax"].clone()
        columns = nn.Parameter(distribute_tensor(torch.ones(64, 128), mesh, [Shard(1)]))
        found["kept"] = NVFP4AdamW([columns]).kept
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        distributed.destroy_process_group()


def test_two_ranks_take_the_steps_of_one(tmp_path, monkeypatch, eager):
    torch.multiprocessing.spawn(on_a_rank, (str(tmp_path),), nprocs=RANKS)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for kind, moment in (("adamw", "exp_avg"), ("muon", "momentum")):
        net = model()
        optimizer = optimizer_of(kind, net)
        train(net, optimizer)
        for name, p in net.named_parameters():
            assert not torch.equal(p, model().get_parameter(name))
            for found in ranks:
                assert torch.equal(p, found[kind][name]), (kind, name)
        whole = optimizer.state[net[0].weight][moment]
        codes = torch.cat([found[f"{kind}-codes"] for found in ranks])
        assert torch.equal(codes.view(-1), whole["codes"].view(-1))
        assert all(torch.equal(found[f"{kind}-amax"], whole["amax"]) for found in ranks)
    assert ranks[0]["kept"] == {"parameter 0": "is sharded along axis 1, which cuts its tiles"}
