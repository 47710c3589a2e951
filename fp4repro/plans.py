"""What each experiment runs at a scale: one section of the scale file each.

`workflow/schemas/scale.schema.yaml` describes every field, its unit and its default.
"""

from dataclasses import dataclass


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
class Evals:
    """What is evaluated: every model in every arithmetic; the first pair is what others compare with."""

    tasks: tuple[str, ...]
    models: tuple[str, ...]  # runs as <recipe>/seed-<number>, or names of Hugging Face models
    recipes: tuple[str, ...]  # of the forward pass, as in fp4repro.evals.arithmetic
    mmlu_pro: str  # "local", "hub" or a folder
    limit: int | None = None  # questions of a task, spread evenly over it


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
    "evals": Evals,
}
