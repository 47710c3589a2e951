"""The protocols by which runs are made, and what each changes in the scale.

pretrain    a recipe from scratch
ablations   an entry of configs/ablations.yaml from scratch, in the run that the entry asks for
fullstack   an entry of configs/fullstack.yaml, or a recipe, from scratch in the scale's full-stack run
trunk       BF16 until the share `branch_from` of a run's steps, in the stable phase, and kept
branches    an entry (or recipe) from a trunk's weights, optimiser state and place in the data, at the peak
            learning rate: the paper's own way for its 12B ablations (arXiv 2509.25149, figure 4)

A trunk's steps, and a branch's, are those of one run of the scale whose learning rate has not begun to
fall, so a BF16 branch is the scale's BF16 run at that step.
"""

from dataclasses import replace

from fp4repro.ablations import Ablation
from fp4repro.config import Phase, Scale
from fp4repro.models import ModelConfig, parameter_count

PROTOCOLS = ("pretrain", "ablations", "fullstack", "trunk", "branches")
PRETRAIN, ABLATIONS, FULLSTACK, TRUNK, BRANCHES = PROTOCOLS
KEEP_WEIGHTS = (PRETRAIN, TRUNK)  # an ablation is asked for its losses alone


def trunk_steps(scale: Scale) -> int:
    return round(scale.ablations.branch_from * scale.training.steps)


def scale_of(scale: Scale, protocol: str, ablation: Ablation | None = None) -> Scale:
    """The scale as a run of this protocol takes it."""
    training = scale.training
    if protocol == ABLATIONS and ablation:
        change = ablation.run
        if change.model:
            scale = replace(scale, model=change.model, model_overrides={})
        steps = change.tokens * training.steps
        if change.tokens_per_parameter:
            tokens = change.tokens_per_parameter * _parameters_of_blocks(scale)
            steps = scale.ablations.token_share * tokens / training.tokens_per_step
        tokens = max(1, round(steps)) * training.tokens_per_step
        return replace(scale, training=replace(training, tokens=tokens))
    if protocol == FULLSTACK:
        return scale.fullstack_run
    if protocol in (TRUNK, BRANCHES):
        steps = trunk_steps(scale) + (scale.ablations.branch_steps if protocol == BRANCHES else 0)
        warmup = round(training.warmup_fraction * training.steps)
        stable = {"warmup_fraction": warmup / steps, "decay_fraction": 0.0}
        stable |= {"phases": _cut(training.phases, training.steps / steps)}
        return replace(scale, training=replace(training, tokens=steps * training.tokens_per_step, **stable))
    return scale


def _cut(phases: tuple[Phase, ...], longer: float) -> tuple[Phase, ...]:
    """The phases of a run so many times longer, of which only the start is made."""
    cut = [replace(phase, until=min(longer * phase.until, 1.0)) for phase in phases]
    return tuple(p for n, p in enumerate(cut) if n == 0 or cut[n - 1].until < 1)


def _parameters_of_blocks(scale: Scale) -> int:
    """Of the scale's model without embedding, head and norms."""
    counts = parameter_count(ModelConfig.from_yaml(scale.model_path))
    return sum(count for kind, count in counts.items() if "." in kind)
