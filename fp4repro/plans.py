"""What each experiment runs at a scale: one section of the scale file each.

`workflow/schemas/scale.schema.yaml` describes every field, its unit and its default.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pretrain:
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Ablations:
    """Which entries of `configs/ablations.yaml` run from scratch, and which as branches."""

    scratch: tuple[str, ...]
    scratch_seeds: tuple[int, ...]
    token_share: float  # of the tokens that an entry states for each parameter
    branches: tuple[str, ...]
    branch_seeds: tuple[int, ...]
    branch_from: float  # share of the run's steps
    branch_steps: int


@dataclass(frozen=True)
class Fullstack:
    """Which entries of `configs/fullstack.yaml` run, as the ablations do; branches leave their trunks.

    What runs from scratch may be smaller than the scale's own run: another model, other fields of
    `training`. With neither, BF16 is the pretraining run of the same seed.
    """

    scratch: tuple[str, ...]
    scratch_seeds: tuple[int, ...]
    branches: tuple[str, ...]
    branch_seeds: tuple[int, ...]
    model: str | None = None
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def own_run(self) -> bool:
        return bool(self.model or self.training)


@dataclass(frozen=True)
class AttentionControl:
    """Training of the tiny language model with D and P apart (`fullstack.attention_control`)."""

    steps: int
    width: int
    seeds: tuple[int, ...]
    reduced: bool  # only what shows the effect


@dataclass(frozen=True)
class Fidelity:
    """The gradient and sensitivity studies."""

    models: tuple[str, ...]
    tokens: int
    draws: int
    recipes: tuple[str, ...]  # none: all
    whole: tuple[str, ...]
    share: float
    blocks: int | None = None


@dataclass(frozen=True)
class FullstackOptim:
    matrix: int  # side of the matrices that are multiplied and orthogonalised
    steps: int
    width: int  # of the tiny language model
    trained: tuple[str, ...]  # names of fullstack.optimizer_states.recipes
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """Models that are asked the same: every model in every arithmetic."""

    tasks: tuple[str, ...]
    models: tuple[str, ...]  # runs as <recipe>/seed-<number>, or names of pretrained models
    recipes: tuple[str, ...]  # of the forward pass, as in fp4repro.evals.arithmetic
    limit: int | None = None  # questions of a task, spread evenly over it


@dataclass(frozen=True)
class Evals:
    """What is evaluated: our runs, whose first is what others compare with, and pretrained models."""

    runs: Asked
    pretrained: Asked
    mmlu_pro: str  # "local", "hub" or a folder

    @property
    def models(self) -> tuple[str, ...]:
        return self.runs.models + self.pretrained.models


@dataclass(frozen=True)
class Cluster:
    """What one training runs on."""

    nodes: int
    ranks: int  # of a node: one a GPU, or processes on a CPU
    memory_gb: int  # main memory of a node
    hours: float  # that a job may take; it goes on from its checkpoint when it is started again
    gpu: str  # of configs/devices.yaml, for plans

    @property
    def size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks


SECTIONS = {
    "cluster": Cluster,
    "pretrain": Pretrain,
    "fidelity": Fidelity,
    "fullstack_optim": FullstackOptim,
    "attention_control": AttentionControl,
}
