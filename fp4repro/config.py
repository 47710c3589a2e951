"""Scale files: one YAML file says what every experiment runs on and how much of it.

`workflow/schemas/scale.schema.yaml` describes each key, its unit and its default; this module
checks a file against it, then what a schema cannot say (sizes that must divide each other), and
hands out frozen dataclasses. Every mistake is one sentence: which file, where in it, what to
write instead.
"""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jsonschema
import yaml

from fp4repro.errors import Fp4ReproError
from fp4repro.recipes import recipe

_ROOT = Path(__file__).parents[1]
SCHEMAS = _ROOT / "workflow" / "schemas"
MODELS = _ROOT / "configs" / "models"

# Blocks of at most 128 values run along the tokens in the weight gradient (FP8's 1x128).
TOKEN_MULTIPLE = 128


@dataclass(frozen=True)
class Tokenizer:
    vocabulary: int  # entries, with the 256 bytes and the end of a text


@dataclass(frozen=True)
class CorpusBytes:
    train: int | None  # bytes at most, None for all
    validation: int | None


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
class Pretrain:
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Fidelity:
    """The gradient and sensitivity studies; the schema describes the fields."""

    models: tuple[str, ...]
    tokens: int
    draws: int
    blocks: int | None
    recipes: tuple[str, ...]  # none: all
    whole: tuple[str, ...]
    share: float


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
    fidelity: Fidelity
    device: Literal["auto", "cpu", "cuda"]
    threads: int
    log_every: int | None

    @property
    def model_path(self) -> Path:
        return MODELS / f"{self.model}.yaml"


def load_scale(path: str | Path) -> Scale:
    """Read and check a scale file; all its mistakes are raised together, one sentence a line."""
    path = Path(path)
    document = read_yaml(path)
    schema = read_yaml(SCHEMAS / "scale.schema.yaml")
    check(document, schema, path)
    filled = _with_defaults(document, schema, schema)
    parts = {
        "corpus_bytes": CorpusBytes(**{"train": None, "validation": None} | filled["corpus_bytes"]),
        "tokenizer": Tokenizer(**filled["tokenizer"]),
        "training": Training(**_tuples(filled["training"])),
        "pretrain": Pretrain(**_tuples(filled["pretrain"])),
        "fidelity": Fidelity(**{"blocks": None} | _tuples(filled["fidelity"])),
    }
    scale = Scale(**{"log_every": None} | filled | parts)
    _raise(list(_faults(scale, path)))
    return scale


class _Loader(yaml.SafeLoader):
    """YAML with two traps closed: a key given twice is refused, and 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: Path) -> Any:
    """The document of one YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise Fp4ReproError(f"{path} does not exist{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Fp4ReproError(f"{path} cannot be read as UTF-8 text: {error}") from None
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise Fp4ReproError(f"{path}{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise Fp4ReproError(f"{path}: not valid YAML: {error}") from None


def check(document: Any, schema: dict, path: Path) -> None:
    """Compare a document with a JSON schema; raises all its mistakes, one sentence a line."""
    _raise([f"{path}: {where} is {value}, which is not a number" for where, value in _not_finite(document)])
    validator = jsonschema.Draft202012Validator(schema)
    errors = sorted(validator.iter_errors(document), key=lambda e: [str(p) for p in e.absolute_path])
    _raise([f"{path}: {sentence}" for error in errors for sentence in _sentences(error)])


def _not_finite(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Numbers that YAML can write and no setting can be: .nan and .inf."""
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _not_finite(item, f"{where}.{key}" if where else str(key))


def _raise(sentences: list[str]) -> None:
    if sentences:
        raise Fp4ReproError("\n".join(sentences))


def _sentences(error: jsonschema.ValidationError) -> Iterator[str]:
    """What is wrong, in plain words; jsonschema's own message where it is plain already."""
    where = ".".join(str(part) for part in error.absolute_path) or "the file"
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        for key in sorted(set(error.instance) - set(known), key=str):
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            yield f"unknown key {key!r} in {where}; {hint}"
    elif error.validator == "required":
        missing = [key for key in error.validator_value if key not in error.instance]
        # One error a missing key: each names its own, which is what its message begins with.
        yield from (f"{where} lacks the key {k!r}" for k in missing if repr(k) in error.message)
    elif error.validator == "type":
        wanted = error.validator_value
        wanted = " or ".join(wanted) if isinstance(wanted, list) else wanted
        yield f"{where} is {error.instance!r}, which is not of type {wanted}"
    elif error.validator == "enum":
        allowed = ", ".join(map(str, error.validator_value))
        yield f"{where} is {error.instance!r}, not one of {allowed}"
    elif error.validator == "oneOf":
        ways = [" and ".join(way["required"]) for way in error.validator_value]
        yield f"{where} must have {', or else '.join(ways)}"
    elif error.validator == "multipleOf":
        yield f"{where} is {error.instance}, which is not a multiple of {error.validator_value}"
    else:
        yield f"{where}: {error.message}"


def _with_defaults(value: Any, schema: dict, root: dict) -> Any:
    """A copy of a valid document, in which a key that is missing has its schema's default."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]] | schema
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") or schema.get("else", {}).get("properties", {})
    missing = {k: s["default"] for k, s in properties.items() if k not in value and "default" in s}
    return {k: _with_defaults(v, properties.get(k, {}), root) for k, v in (value | missing).items()}


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
