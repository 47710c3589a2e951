"""What a scale's trainings cost on GPUs before any is begun: `python -m fp4repro.budget --scale FILE`.

Modelled, never measured: a step's seconds by `roofline.step`, with factors fitted to published rows, for
native products of the recipe's formats on data-parallel GPUs, whose communication is hidden; a GPU's bytes by
`memory.account`, with fused kernels, states sharded over the ranks where `training.parallel` is fsdp. Where
the GPU has no units for a format, its products are emulated in BF16: BF16's time stands there as a lower
bound. A late switch to BF16 is left out.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp4repro.ablations import Ablation, load_ablations, recipe_or_ablation
from fp4repro.config import Scale, load_scale
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.memory.account import Assumptions, account
from fp4repro.memory.activations import FUSED
from fp4repro.recipes import Recipe, recipe
from fp4repro.report.markdown import aligned
from fp4repro.report.plan import plans
from fp4repro.roofline.calibrate import fitted
from fp4repro.roofline.devices import Device, device
from fp4repro.roofline.gemm import operand_class
from fp4repro.roofline.linears import format_of
from fp4repro.roofline.step import Setting, step
from fp4repro.train.job import model_of
from fp4repro.train.protocols import BRANCHES, PRETRAIN, TRUNK, scale_of, trunk_steps


@dataclass(frozen=True)
class Cost:
    """Of each of `count` runs alike; None where the model has no answer, and `note` why."""

    run: str  # protocol and recipe
    count: int  # seeds
    steps: int
    gpus: int
    hours: float | None
    gib: float | None  # of one GPU
    note: str = ""

    @property
    def gpu_hours(self) -> float | None:
        """Of all runs alike."""
        return None if self.hours is None else self.count * self.gpus * self.hours


def planned(scale: Scale, entries: dict[str, Ablation]) -> Counter[tuple[str, str]]:
    """(protocol, recipe or ablation) of a scale's runs, with the number of their seeds."""
    folders = {
        f"{PRETRAIN}/{name}/seed-{seed}" for name in scale.pretrain.recipes for seed in scale.pretrain.seeds
    }
    for plan in plans(scale, entries):
        folders |= set(plan.folders())
        if plan.protocol == BRANCHES:
            folders |= {f"{BRANCHES}/{TRUNK}/seed-{seed}" for seed in plan.seeds}
    found = Counter(tuple(folder.split("/")[:2]) for folder in sorted(folders))
    order = [(PRETRAIN, name) for name in scale.pretrain.recipes] + [(BRANCHES, TRUNK)]
    return Counter({key: found[key] for key in dict.fromkeys([*order, *found]) if found[key]})


def costs(scale: Scale, entries: dict[str, Ablation]) -> Iterator[Cost]:
    """The cost of every run that the scale plans, on the GPUs of its cluster section."""
    on = device(scale.cluster.gpu)
    for (protocol, name), count in planned(scale, entries).items():
        trunk = (protocol, name) == (BRANCHES, TRUNK)
        taken = scale_of(scale, TRUNK if trunk else protocol, entries.get(name))
        asked = recipe("bf16") if trunk else recipe_or_ablation(name, entries)
        steps = taken.training.steps - (trunk_steps(scale) if protocol == BRANCHES and not trunk else 0)
        hours = gib = None
        try:
            hours, note = _hours(taken, asked, on, steps)
            gib = _gib(taken, asked)
            if gib * 2**30 > on.capacity * 1e9:
                note = f"more than the {on.capacity:g} GB of a {on.name}; {note}".removesuffix("; ")
        except Fp4ReproError as error:
            note = str(error)
        yield Cost(f"{protocol}/{name}", count, steps, scale.cluster.size, hours, gib, note)


def _hours(scale: Scale, asked: Recipe, on: Device, steps: int) -> tuple[float, str]:
    training = scale.training
    setting = Setting(
        sequence=training.context,
        microbatch=training.microbatch,
        batch=training.batch,
        gpus=scale.cluster.size,
    )
    used, note = asked, ""
    formats = [format_of(asked, product) for product in ("fprop", "dgrad", "wgrad")]
    if any(operand_class(fmt) not in on.peak for fmt in formats):
        used, note = recipe("bf16"), f"at least: emulated, as a {on.name} has no units for it"
    return steps * step(model_of(scale), used, on, fitted(), setting).seconds / 3600, note


def _gib(scale: Scale, asked: Recipe) -> float:
    training = scale.training
    sharing = scale.cluster.size if training.parallel == "fsdp" else 1
    tokens = training.microbatch * training.context
    assumed = Assumptions(sharing, tokens, FUSED, orientations=2, padded=True, attention_bits=16)
    return account(model_of(scale), asked, assumed).total / 2**30


def table(scale: Scale, found: Sequence[Cost]) -> str:
    """The plan as text."""
    cluster = scale.cluster
    head = (
        f"Plan of scale {scale.scale} on {cluster.nodes} x {cluster.ranks} {cluster.gpu}, modelled for "
        "native products, not measured:"
    )
    header = ["run", "seeds", "steps", "GPUs", "hours", "GPU hours", "GiB a GPU", ""]
    lines = [
        [
            c.run,
            str(c.count),
            f"{c.steps:,}",
            str(c.gpus),
            _figure(c.hours),
            _figure(c.gpu_hours),
            _figure(c.gib),
            c.note,
        ]
        for c in found
    ]
    known = [c.gpu_hours for c in found if c.gpu_hours is not None]
    lines.append(["together", str(sum(c.count for c in found)), "", "", "", _figure(sum(known)), "", ""])
    return "\n".join([head, *aligned(header, lines)])


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plan(scale: Scale) -> str:
    """The table of a scale's own cluster."""
    return table(scale, list(costs(scale, load_ablations())))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.budget", description=__doc__)
    parser.add_argument("--scale", type=Path, required=True, help="a file of configs/scales")
    parser.add_argument("--gpu", help="a GPU of configs/devices.yaml in place of the scale's")
    parser.add_argument("--nodes", type=int, help="in place of the scale's")
    parser.add_argument("--ranks", type=int, help="GPUs of a node, in place of the scale's")
    arguments = parser.parse_args()
    scale = load_scale(arguments.scale)
    given = {name: getattr(arguments, name) for name in ("gpu", "nodes", "ranks") if getattr(arguments, name)}
    print(plan(replace(scale, cluster=replace(scale.cluster, **given))))


if __name__ == "__main__":
    run_stage("fp4repro.budget", main)
