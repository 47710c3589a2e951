"""What a scale plans of an experiment's entries: names by protocol, and the folder of each run.

Runs from scratch have their baselines among the pretraining runs of the same seeds, but for full-stack
runs smaller than the scale's own; every branch has the BF16 branch of its trunk. At a small depth two
rules for BF16 blocks can come to the same blocks: the later entry is then the earlier one's run
(`alias`), is not trained again, and the table says so.
"""

from dataclasses import dataclass
from typing import Literal

from fp4repro.ablations import Ablation, RunChange, recipe_or_ablation
from fp4repro.config import MODELS, Scale
from fp4repro.recipes import KeepBF16, Recipe, recipe_names
from fp4repro.schemas import read_yaml

SCRATCH, BRANCHES = PROTOCOLS = ("scratch", "branches")
ABLATIONS, FULLSTACK = "ablations", "fullstack"  # sections of a scale with entries
Experiment = Literal["ablations", "fullstack"]


@dataclass(frozen=True)
class Plan:
    """One protocol at one scale: the entries of its table, their seeds, all names that must run, and the
    folders that recipes and other entries lie in. `scale` is as the runs take it."""

    scale: Scale
    protocol: str
    entries: tuple[str, ...]
    seeds: tuple[int, ...]
    names: tuple[str, ...]
    alias: dict[str, str]
    homes: tuple[str, str]

    def folder(self, name: str, seed: int) -> str:
        """The run's folder within results/<scale>."""
        name = self.alias.get(name, name)
        return f"{self.homes[name not in recipe_names()]}/{name}/seed-{seed}"

    def folders(self) -> list[str]:
        """Folders of all runs, each once."""
        return list(dict.fromkeys(self.folder(name, seed) for name in self.names for seed in self.seeds))


def plans(scale: Scale, entries: dict[str, Ablation], experiment: Experiment = ABLATIONS) -> list[Plan]:
    """The plan of each protocol that the scale uses for the experiment, `entries` being all of its file."""
    section = getattr(scale, experiment)
    given = {SCRATCH: section.scratch, BRANCHES: section.branches}
    seeds = {SCRATCH: section.scratch_seeds, BRANCHES: section.branch_seeds}
    return [_plan(scale, entries, experiment, p, given[p], seeds[p]) for p in PROTOCOLS if given[p]]


def _plan(
    scale: Scale,
    ablations: dict[str, Ablation],
    experiment: Experiment,
    protocol: str,
    entries: tuple[str, ...],
    seeds: tuple[int, ...],
) -> Plan:
    compared = [ablations[name].baseline for name in entries]
    homes = ("pretrain", experiment) if protocol == SCRATCH else (BRANCHES, BRANCHES)
    if protocol == SCRATCH and experiment == FULLSTACK:
        homes = (FULLSTACK, FULLSTACK) if scale.fullstack.own_run else homes
        scale = scale.fullstack_run
    elif protocol == SCRATCH:  # other recipes are trained as pretraining runs in any case
        others = {c.than for name in entries for c in ablations[name].claims}
        others |= {ablations[name].base for name in entries}  # where a token factor begins
        compared += [name for name in scale.pretrain.recipes if name in others]
    names = tuple(dict.fromkeys([*compared, *entries]))
    first, alias = {}, {}
    for name in names:
        settings = _settings_here(scale, ablations, name)
        if settings in first:
            alias[name] = first[settings]
        else:
            first[settings] = name
    return Plan(scale, protocol, entries, seeds, names, alias, homes)


def _settings_here(scale: Scale, ablations: dict[str, Ablation], name: str) -> tuple:
    """What decides a run of the entry, with the blocks in BF16 spelled out for the model's depth."""
    recipe = recipe_or_ablation(name, ablations)
    run = ablations[name].run if name in ablations else RunChange()
    if not recipe.quantises:
        return Recipe(name="", attention=recipe.attention, optimizer=recipe.optimizer), run
    blocks = frozenset(recipe.keep.blocks(depth(scale, run.model)))
    return recipe.replace(name="", keep=KeepBF16(names=recipe.keep.names)), blocks, run


def depth(scale: Scale, model: str | None = None) -> int:
    """Blocks of the scale's model, or of another one."""
    settings = read_yaml(MODELS / f"{model}.yaml" if model else scale.model_path)
    return len((settings | ({} if model else scale.model_overrides))["pattern"])
