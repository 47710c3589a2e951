"""The plan of a scale's trainings on GPUs, against its parts and against what no GPU can beat."""

import dataclasses
import sys
from pathlib import Path

import pytest

from fp4repro import budget
from fp4repro.ablations import load_ablations
from fp4repro.config import load_scale
from fp4repro.models import parameter_count
from fp4repro.plans import Cluster
from fp4repro.recipes import recipe
from fp4repro.roofline.calibrate import fitted, model_config
from fp4repro.roofline.devices import device
from fp4repro.roofline.step import Setting, step
from fp4repro.train.launch import launcher

SCALES = Path(__file__).parents[1] / "configs" / "scales"
ENTRIES = load_ablations()
ONE = Cluster(nodes=1, ranks=1, memory_gb=4, hours=24, gpu="GB300")


@pytest.fixture(scope="module")
def paper():
    scale = load_scale(SCALES / "paper.yaml")
    return scale, {cost.run: cost for cost in budget.costs(scale, ENTRIES)}


def test_hours_are_tokens_over_the_step_models_speed(paper):
    _, costs = paper
    setting = Setting(sequence=8192, microbatch=1, batch=736, gpus=184)
    speed = step(model_config("nemotron-12b"), recipe("nvfp4"), device("GB300"), fitted(), setting)
    expected = 1e13 / (184 * speed.tokens_per_second) / 3600
    assert costs["pretrain/nvfp4"].hours == pytest.approx(expected, rel=1e-5)
    assert costs["pretrain/nvfp4"].gpu_hours == pytest.approx(184 * expected, rel=1e-5)


def test_no_plan_beats_the_hardware(paper):
    """6 FLOP a parameter and token at the data sheet's rate, of FP4 for all of it; nor is one idle mostly."""
    _, costs = paper
    flop = 6 * 1e13 * sum(parameter_count(model_config("nemotron-12b")).values())
    for name, peak in (("nvfp4", 15e15), ("fp8", 5e15)):
        least = flop / peak / 3600
        assert least < costs[f"pretrain/{name}"].gpu_hours < 12 * least
    assert costs["pretrain/nvfp4"].hours < costs["pretrain/fp8"].hours < 3 * costs["pretrain/nvfp4"].hours


def test_branches_cost_their_own_steps_and_the_trunk_its(paper):
    scale, costs = paper
    per_step = costs["branches/bf16"].hours / scale.ablations.branch_steps
    assert costs["branches/trunk"].steps == round(0.343 * scale.training.steps)
    assert costs["branches/trunk"].hours == pytest.approx(per_step * costs["branches/trunk"].steps, rel=1e-9)
    assert costs["branches/last_4"].hours < costs["branches/nvfp4"].hours < costs["branches/bf16"].hours


def test_every_planned_run_is_there_with_its_seeds():
    scale = load_scale(SCALES / "laptop.yaml")
    planned = budget.planned(scale, ENTRIES)
    assert planned["pretrain", "nvfp4"] == 3 and planned["branches", "trunk"] == 3
    assert ("branches", "last_4") not in planned  # the same runs as no_bf16_layers
    assert planned["branches", "no_bf16_layers"] == len(scale.ablations.branch_seeds)


def test_memory_is_states_over_ranks_and_activations(paper):
    scale, costs = paper
    parameters = sum(parameter_count(model_config("nemotron-12b")).values())
    states = 16 * parameters / 184 / 2**30
    assert states < costs["pretrain/nvfp4"].gib < device("GB300").capacity / 1.073741824
    few = dataclasses.replace(scale, cluster=dataclasses.replace(scale.cluster, nodes=1, ranks=1))
    (alone,) = (c for c in budget.costs(few, ENTRIES) if c.run == "pretrain/nvfp4")
    assert alone.gib - costs["pretrain/nvfp4"].gib > 0.9 * 16 * parameters * (1 - 1 / 184) / 2**30
    assert alone.note == "" and alone.gpus == 1
    h100 = dataclasses.replace(few, cluster=dataclasses.replace(few.cluster, gpu="H100"))
    (small,) = (c for c in budget.costs(h100, ENTRIES) if c.run == "pretrain/nvfp4")
    assert small.note.startswith("more than the 80 GB of a H100; at least: emulated")


def test_formats_without_units_are_bf16s_time_and_say_so():
    scale = load_scale(SCALES / "gpu.yaml")
    costs = {cost.run: cost for cost in budget.costs(scale, ENTRIES)}
    assert scale.cluster.gpu == "H200"
    assert costs["pretrain/nvfp4"].hours == costs["pretrain/bf16"].hours > costs["pretrain/fp8"].hours
    assert costs["pretrain/nvfp4"].note == "at least: emulated, as a H200 has no units for it"
    assert costs["pretrain/fp8"].note == ""


def test_what_is_not_modelled_says_why():
    scale = load_scale(SCALES / "gpu.yaml")
    names = dataclasses.replace(scale.pretrain, recipes=("nemotron3-super", "nvfp4"))
    odd, whole = budget.costs(dataclasses.replace(scale, pretrain=names), ENTRIES)
    if odd.hours is None:
        assert odd.gpu_hours is None and "linears" in odd.note
    assert whole.hours and whole.gib


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["budget", f"--scale={SCALES / 'gpu.yaml'}", "--gpu=B200", "--ranks=4"])
    budget.main()
    said = capsys.readouterr().out
    assert "Plan of scale gpu on 1 x 4 B200, modelled for native products, not measured" in said
    assert "| pretrain/nvfp4" in said and "| together" in said and "GPU hours" in said


def test_ranks_are_started_by_what_they_need():
    assert launcher(ONE, 4) == "python"
    node = launcher(dataclasses.replace(ONE, ranks=8), 4)
    assert node == "python -m torch.distributed.run --standalone --nproc-per-node=8"
    several = launcher(dataclasses.replace(ONE, nodes=3, ranks=8), 4)
    assert several.startswith(
        "srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --cpus-per-task=32 python -m torch"
    )
    assert "--nnodes=3 --nproc-per-node=8" in several and "--rdzv-backend=c10d" in several
