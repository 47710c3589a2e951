"""Scale files: one YAML file says what every experiment runs on and how much of it.

`workflow/schemas/scale.schema.yaml` describes each key, its unit and its default; this module
checks a file against it, then what a schema cannot say (sizes that must divide each other), and
hands out frozen dataclasses. Every mistake is one sentence: which file, where in it, what to
write instead.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fp4repro.ablations import FULLSTACK, Ablation, load_ablations
from fp4repro.errors import Fp4ReproError
from fp4repro.plans import (
    SECTIONS,
    Ablations,
    Asked,
    AttentionControl,
    Cluster,
    Evals,
    Fidelity,
    Fullstack,
    FullstackOptim,
    Pretrain,
)
from fp4repro.recipes import recipe
from fp4repro.schemas import ROOT, SCHEMAS, check, raise_all, read_yaml, with_defaults

MODELS = ROOT / "configs" / "models"
BENCHMARKS = ROOT / "configs" / "benchmarks.yaml"

# Blocks of at most 128 values run along the tokens in the weight gradient (FP8's 1x128).
TOKEN_MULTIPLE = 128


@dataclass(frozen=True)
class Tokenizer:
    vocabulary: int  # entries, with the 256 bytes and the end of a text
    name: str | None = None  # of an existing one; None: trained


@dataclass(frozen=True)
class CorpusBytes:
    train: int | None  # bytes at most, None for all
    validation: int | None


@dataclass(frozen=True)
class Phase:
    """A part of a run with one blend of the corpus's sources."""

    until: float  # share of the run's steps
    mixture: dict[str, float]  # share of its sequences by source


@dataclass(frozen=True)
class Training:
    """One run; the schema describes the fields."""

    tokens: int
    batch: int  # sequences a step
    context: int  # tokens a sequence
    accumulate: int  # micro-batches a step
    learning_rate: float
    final_learning_rate_ratio: float
    warmup_fraction: float
    decay_fraction: float
    decay_shape: Literal["linear", "minus-sqrt"]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    validation_every: int  # steps
    validation_tokens: int
    checkpoint_every: int  # steps
    keep_checkpoints: int = 1
    parallel: Literal["ddp", "fsdp"] = "ddp"
    gradients: Literal["fp32", "bf16"] = "fp32"
    recompute_activations: bool = False
    phases: tuple[Phase, ...] = ()  # of a corpus of sources

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def steps(self) -> int:
        return self.tokens // self.tokens_per_step

    @property
    def microbatch(self) -> int:
        """Sequences of one forward pass."""
        return self.batch // self.accumulate


@dataclass(frozen=True)
class Scale:
    scale: str
    description: str
    model: str
    model_overrides: dict[str, Any]
    corpus: str | dict[str, Any]
    corpus_bytes: CorpusBytes
    tokenizer: Tokenizer
    training: Training
    pretrain: Pretrain
    ablations: Ablations
    fullstack: Fullstack
    attention_control: AttentionControl
    fidelity: Fidelity
    fullstack_optim: FullstackOptim
    evals: Evals
    cluster: Cluster
    device: Literal["auto", "cpu", "cuda"]
    threads: int
    compile: bool
    log_every: int | None
    health_every: int | None
    tensorboard: bool

    @property
    def model_path(self) -> Path:
        return MODELS / f"{self.model}.yaml"

    @property
    def fullstack_run(self) -> "Scale":
        """The scale as full-stack runs from scratch take it."""
        section = self.fullstack
        training = replace(self.training, **_tuples(section.training))
        if section.model is None:
            return replace(self, training=training)
        return replace(self, model=section.model, model_overrides={}, training=training)


def load_scale(path: str | Path) -> Scale:
    """Read and check a scale file; all its mistakes are raised together, one sentence a line."""
    path = Path(path)
    document = read_yaml(path)
    schema = read_yaml(SCHEMAS / "scale.schema.yaml")
    check(document, schema, path)
    filled = with_defaults(document, schema, schema)
    parts = {
        "corpus_bytes": CorpusBytes(**{"train": None, "validation": None} | filled["corpus_bytes"]),
        "tokenizer": Tokenizer(**filled["tokenizer"]),
        "training": Training(**_tuples(filled["training"] | {"phases": _phases(filled["training"])})),
    }
    parts |= {name: section(**_tuples(filled[name])) for name, section in SECTIONS.items()}
    entries = {"ablations": load_ablations(), "fullstack": load_ablations(FULLSTACK)}
    of_training = schema["properties"]["training"] | {"required": [], "$defs": schema["$defs"]}
    check(filled["fullstack"].get("training", {}), of_training, f"{path}: fullstack.training")
    for name, section in (("ablations", Ablations), ("fullstack", Fullstack)):
        parts[name] = section(**_spelled_out(filled[name], entries[name]))
    parts["evals"] = _evals(filled["evals"])
    scale = Scale(**dict.fromkeys(("log_every", "health_every")) | filled | parts)
    faults = [fault for name in entries for fault in _entry_faults(scale, name, entries[name], path)]
    if scale.fullstack.own_run:
        faults += _faults(scale.fullstack_run, path)
    faults += [*_faults(scale, path), *_phase_faults(scale, path), *_trunk_faults(scale, path)]
    raise_all(list(dict.fromkeys(faults)))
    return scale


def _spelled_out(section: dict, entries: dict[str, Ablation]) -> dict:
    """A section without `all`: every entry from scratch, those that can be as branches."""
    every = {"scratch": list(entries), "branches": [e.name for e in entries.values() if not e.only_whole]}
    return _tuples({k: every[k] if v == "all" else v for k, v in section.items()})


def _evals(section: dict) -> Evals:
    """The section with the runs' entries, which stand in it directly, as a group like the other."""
    mmlu_pro, pretrained = section.pop("mmlu_pro"), section.pop("pretrained")
    runs, pretrained = (Asked(**_tuples(group)) for group in (section, pretrained))
    return Evals(runs, pretrained, mmlu_pro)


def _phases(training: dict) -> list[Phase]:
    return [Phase(**phase) for phase in training["phases"]]


def _tuples(fields: dict) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def _faults(scale: Scale, path: Path) -> Iterator[str]:
    """Sentences on values that are each valid but do not fit together."""
    t = scale.training
    if scale.scale != path.stem:
        yield f"{path}: scale is {scale.scale!r}, but a scale has its file's name, {path.stem!r}"
    if not scale.model_path.is_file():
        known = ", ".join(sorted(p.stem for p in MODELS.glob("*.yaml")))
        yield f"{path}: there is no model {scale.model!r} in configs/models, which has: {known}"
    if "vocabulary" in scale.model_overrides:
        yield f"{path}: model_overrides.vocabulary is the tokenizer's to say: change tokenizer.vocabulary"
    for name in scale.pretrain.recipes:
        try:
            recipe(name)
        except Fp4ReproError as error:
            yield f"{path}: pretrain.recipes: {error}"
    if t.batch % t.accumulate:
        yield (
            f"{path}: training.batch of {t.batch} sequences cannot be split into "
            f"training.accumulate = {t.accumulate} equal micro-batches"
        )
    elif t.microbatch * t.context % TOKEN_MULTIPLE:
        yield (
            f"{path}: a micro-batch has {t.microbatch} sequences of {t.context} tokens, and "
            f"{t.microbatch * t.context} is not a multiple of {TOKEN_MULTIPLE}, as the blocks of "
            "the weight gradient need; change training.batch or training.context"
        )
    if t.accumulate % scale.cluster.size:
        yield (
            f"{path}: training.accumulate is {t.accumulate}, which the {scale.cluster.size} ranks of cluster "
            f"cannot share evenly: set it to a multiple of {scale.cluster.size}"
        )
    if t.steps < 1:
        yield (
            f"{path}: training.tokens = {t.tokens} is less than one batch, which is "
            f"{t.batch} x {t.context} = {t.tokens_per_step} tokens"
        )
    if t.validation_tokens % t.context or t.validation_tokens % TOKEN_MULTIPLE:
        yield (
            f"{path}: training.validation_tokens = {t.validation_tokens} must be a multiple of "
            f"training.context = {t.context} and of {TOKEN_MULTIPLE}"
        )
    if t.warmup_fraction + t.decay_fraction > 1:
        yield (
            f"{path}: training.warmup_fraction and training.decay_fraction add up to "
            f"{t.warmup_fraction + t.decay_fraction:g}, more than the whole run"
        )


def _phase_faults(scale: Scale, path: Path) -> Iterator[str]:
    sources = scale.corpus.get("sources", {}) if isinstance(scale.corpus, dict) else {}
    phases = scale.training.phases
    if isinstance(scale.corpus, dict) and "bytes" in scale.corpus.get("huggingface", {}):
        yield f"{path}: corpus.huggingface.bytes is for sources: set corpus_bytes.train in its place"
    if bool(sources) != bool(phases):
        yield f"{path}: corpus.sources and training.phases belong together: give both or neither"
        return
    ends = [phase.until for phase in phases]
    if phases and (ends != sorted(set(ends)) or ends[-1] != 1):
        yield f"{path}: training.phases end at {ends}, but their `until` must ascend and end with 1.0"
    for number, phase in enumerate(phases):
        where = f"{path}: training.phases.{number}.mixture"
        for name in sorted(set(phase.mixture) - set(sources)):
            yield f"{where}: corpus.sources has no {name!r}; it has {', '.join(sorted(sources))}"
        total = sum(phase.mixture.values())
        if abs(total - 1) > 1e-6:
            yield f"{where}: the weights add up to {total:g}, but must add up to 1"
        for name, weight in phase.mixture.items():
            if abs(1000 * weight - round(1000 * weight)) > 1e-6:
                yield f"{where}: {name} is {weight}, but weights are whole thousandths"
    for name in sorted(set(sources) - {name for phase in phases for name in phase.mixture}):
        yield f"{path}: corpus.sources: {name} is in no mixture of training.phases: use it or take it out"


def _entry_faults(scale: Scale, section: str, entries: dict[str, Ablation], path: Path) -> Iterator[str]:
    plan = getattr(scale, section)
    for protocol in ("scratch", "branches"):
        for name in getattr(plan, protocol):
            if name not in entries:
                near = difflib.get_close_matches(name, entries, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                yield f"{path}: {section}.{protocol}: configs/{section}.yaml has no entry {name!r}{hint}"
    for name in plan.branches:
        if name in entries and entries[name].only_whole:
            yield (
                f"{path}: {section}.branches: {name} {entries[name].only_whole}, which only a run from "
                f"scratch can hold: name it under {section}.scratch"
            )


def _trunk_faults(scale: Scale, path: Path) -> Iterator[str]:
    plan, t = scale.ablations, scale.training
    trunk, warmup = round(plan.branch_from * t.steps), round(t.warmup_fraction * t.steps)
    stable = t.steps - round(t.decay_fraction * t.steps)
    sound = t.steps and t.warmup_fraction + t.decay_fraction <= 1  # else told already
    if (plan.branches or scale.fullstack.branches) and sound and not max(warmup, 1) <= trunk < stable:
        yield (
            f"{path}: ablations.branch_from = {plan.branch_from} is step {trunk}, but branches leave a run "
            f"in its stable phase, which here is from step {max(warmup, 1)} to {stable}"
        )
