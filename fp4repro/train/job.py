"""One run as it is asked for: scale, recipe, seed and protocol, with what follows from them."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fp4repro
from fp4repro.config import Scale
from fp4repro.data.mixture import Batches, Mixture, batches
from fp4repro.data.tokens import TokenData
from fp4repro.errors import Fp4ReproError
from fp4repro.files import sha256
from fp4repro.layers import follow_splits
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.optim import build_optimizer
from fp4repro.report.schema import run_setting
from fp4repro.train import shards
from fp4repro.train.checkpoint import load_checkpoint
from fp4repro.train.loop import Run
from fp4repro.train.phases import Phases
from fp4repro.train.protocols import BRANCHES, PRETRAIN, TRUNK
from fp4repro.train.world import ALONE, World


def model_of(scale: Scale) -> ModelConfig:
    """The scale's model, with its overrides and the tokenizer's vocabulary."""
    model = ModelConfig.from_yaml(scale.model_path)
    changes = scale.model_overrides | {"vocabulary": scale.tokenizer.vocabulary}
    try:
        return model.replace(**changes)
    except Fp4ReproError as error:
        raise Fp4ReproError(
            f"model {scale.model} with the model_overrides of scale {scale.scale}: {error}"
        ) from None


@dataclass(frozen=True)
class Trunk:
    """The run that branches leave, and the checkpoint that it kept at its end."""

    job: "Job"
    path: Path

    def state(self) -> dict[str, Any]:
        state = load_checkpoint(self.path, self.job.settings())
        if state is None:
            raise Fp4ReproError(f"{self.path} does not exist: train the trunk of seed {self.job.seed} first")
        return state


@dataclass(frozen=True)
class Job:
    """All that decides a run's bits."""

    scale: Scale
    model: ModelConfig
    recipe: fp4repro.Recipe
    seed: int
    data: TokenData
    device: torch.device
    protocol: str = PRETRAIN
    trunk: Trunk | None = None  # what a branch leaves

    @property
    def first_step(self) -> int:
        """Steps that the trunk has done."""
        return self.trunk.job.scale.training.steps if self.trunk else 0

    @property
    def label(self) -> str:
        """The run's setting in the results."""
        return run_setting(self.recipe.name, self.seed)

    @property
    def batches(self) -> Batches | Mixture:
        return batches(self.data.train, self.scale.training, self.seed)

    def begin(self, world: World = ALONE) -> Run:
        """The run before its first step."""
        training = self.scale.training
        if training.parallel == "fsdp":
            shards.check(self.recipe, branching=self.protocol in (TRUNK, BRANCHES))
        model = HybridModel(self.model, generator=torch.Generator().manual_seed(self.seed))
        phases = Phases(model, self.recipe.for_run(training.steps), self.seed, training.steps)
        model.recompute = training.recompute_activations
        world.place(model, self.device, training)
        optimizer = build_optimizer(model, self.recipe.optimizer, training, self.seed)
        follow_splits(model, optimizer)
        if world.shards:
            shards.requantise_after_steps(model, optimizer)
        run = Run(model, optimizer, training, self.device, phases, world)
        if self.trunk:
            run.leave(self.trunk.state())
        return run

    def settings(self) -> dict[str, Any]:
        """The same as plain values, flat, by which a checkpoint knows its run."""
        training = dataclasses.asdict(self.scale.training)
        for decides_nothing in ("checkpoint_every", "keep_checkpoints", "recompute_activations"):
            del training[decides_nothing]
        parts = {
            "model": dataclasses.asdict(self.model),
            "training": training,
            "data": self.data.checksums,
        }
        if self.trunk:
            parts["trunk"] = {"sha256": sha256(self.trunk.path)}
        return {
            "protocol": self.protocol,
            "recipe": self.recipe.name,
            "recipe.fields": repr(self.recipe),
            "seed": self.seed,
            "device": self.device.type,
            "threads": self.scale.threads,
            "torch": str(torch.__version__),
            **{f"{part}.{key}": v for part, values in parts.items() for key, v in values.items()},
        }
