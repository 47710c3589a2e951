"""Ablations as data: a base and the one or two fields replaced, by name in two files.

`configs/ablations.yaml` takes the NVFP4 paper apart, `configs/fullstack.yaml` Full-Stack FP4. A name that
both have is a recipe's, which is the same in both.

`replace` takes the fields of `Recipe` in plain YAML: formats by name (`nvfp4`, `nvfp4-16x16`, null for
BF16), or as a mapping with `format` and fields of `BlockFormat`; other dataclasses as mappings of their
fields. `weights`, `activations` and `gradients` stand for both slots of each. `run` changes the run
instead: another model, or more tokens. `claims` are what a paper says of the entry, beside which the
table sets what was measured. `workflow/schemas/ablations.schema.yaml` describes each key.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fp4repro.core.formats import FORMATS, BlockFormat
from fp4repro.errors import Fp4ReproError
from fp4repro.recipes import Recipe, recipe, recipe_names
from fp4repro.schemas import ROOT, SCHEMAS, check, read_yaml

ABLATIONS, FULLSTACK = (ROOT / "configs" / f"{name}.yaml" for name in ("ablations", "fullstack"))
Expectation = Literal["worse", "better", "same", "diverges"]
BOTH_SLOTS = {
    "weights": ("w_fprop", "w_dgrad"),
    "activations": ("x_fprop", "x_wgrad"),
    "gradients": ("dy_dgrad", "dy_wgrad"),
}


@dataclass(frozen=True)
class Claim:
    """What a publication says of an entry, against another entry or recipe."""

    says: str
    where: str
    expect: Expectation
    than: str
    published: str | None = None  # id of configs/published.yaml, where the claim has a number


@dataclass(frozen=True)
class RunChange:
    """What an entry changes in the run: another model; tokens as a factor of the scale's, or in their place
    tokens for each parameter of the model's blocks, whatever the scale."""

    tokens: float = 1.0
    model: str | None = None
    tokens_per_parameter: float | None = None


@dataclass(frozen=True)
class Ablation:
    """One entry, resolved. `baseline` is what its gap is measured against, beside its base."""

    name: str
    group: str
    base: str
    baseline: str
    recipe: Recipe
    run: RunChange
    claims: tuple[Claim, ...]
    note: str = ""

    @property
    def only_whole(self) -> str:
        """Why a branch of a BF16 trunk cannot hold it; empty where one can."""
        if self.run != RunChange() or self.recipe.late_bf16 is not None:
            return "changes the run itself"
        if self.recipe.optimizer.kind != "adamw":
            return f"trains with {self.recipe.optimizer.kind}, whose states a trunk of AdamW does not have"
        if self.recipe.lora_svd is not None and self.recipe.lora_svd.trainable_factors:
            return "trains factors beside W, of which a trunk's optimizer knows nothing"
        return ""


def load_ablations(path: str | Path = ABLATIONS) -> dict[str, Ablation]:
    """The entries by name, in the file's order; each mistake is refused with a sentence."""
    path = Path(path)
    document = read_yaml(path)
    check(document, read_yaml(SCHEMAS / "ablations.schema.yaml"), path)
    found: dict[str, Ablation] = {}
    for name, entry in document.items():
        try:
            found[name] = _resolve(name, entry, found)
        except Fp4ReproError as error:
            raise Fp4ReproError(f"{path}: {name}: {error}") from None
    for ablation in found.values():
        for other in (ablation.baseline, *(claim.than for claim in ablation.claims)):
            if other not in found and other not in recipe_names():
                raise Fp4ReproError(f"{path}: {ablation.name}: {_unknown(other, found)}")
    return found


def load_entries(ablations: str | Path = ABLATIONS, fullstack: str | Path = FULLSTACK) -> dict[str, Ablation]:
    """The entries of both files, which is what training knows beside recipes."""
    found, more = load_ablations(ablations), load_ablations(fullstack)
    for name in found.keys() & more.keys() - set(recipe_names()):
        raise Fp4ReproError(f"{fullstack}: {name} is an entry of {ablations} already: name it otherwise")
    return more | found


def recipe_or_ablation(name: str, ablations: dict[str, Ablation]) -> Recipe:
    """The recipe of an entry, or a recipe of `fp4repro.recipes`, by name."""
    if name in ablations:
        return ablations[name].recipe
    if name in recipe_names():
        return recipe(name)
    raise Fp4ReproError(_unknown(name, ablations))


def _unknown(name: str, found: dict[str, Ablation]) -> str:
    known = [*recipe_names(), *found]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"recipes: {', '.join(recipe_names())}"
    return f"no recipe and no entry above is named {name!r}; {hint}"


def _resolve(name: str, entry: dict[str, Any], found: dict[str, Ablation]) -> Ablation:
    named = name in recipe_names()
    if named and (entry["base"] != name or "replace" in entry or "run" in entry):
        raise Fp4ReproError(f"is the name of a recipe: base must be {name}, with nothing replaced")
    base_run = found[entry["base"]].run if entry["base"] in found else RunChange()
    base = recipe_or_ablation(entry["base"], found)
    changed = base.replace(**{"name": name, **dict(_fields(entry.get("replace", {})))})
    run = RunChange(**entry["run"]) if "run" in entry else base_run
    if not named and changed.same_as(base) and run == base_run:
        raise Fp4ReproError(f"equals its base {entry['base']}: replace a field with another value")
    for other in found.values():
        if changed.same_as(other.recipe) and run == other.run:
            raise Fp4ReproError(f"has the same settings as {other.name}: leave one of the two out")
    for other in recipe_names():
        if other != name and changed.same_as(recipe(other)) and run == RunChange():
            raise Fp4ReproError(f"has the same settings as the recipe {other}: use that one")
    claims = tuple(Claim(**{"than": entry["base"], **claim}) for claim in entry.get("claims", ()))
    baseline = entry.get("baseline", "bf16")
    return Ablation(
        name, entry["group"], entry["base"], baseline, changed, run, claims, entry.get("note", "")
    )


def _fields(replace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of a recipe from their plain values."""
    hints = get_type_hints(Recipe)
    for key, value in replace.items():
        for name in BOTH_SLOTS.get(key, (key,)):
            yield name, _typed(name, value, hints.get(name))


def _typed(name: str, value: Any, hint: Any) -> Any:
    """A plain value as the type of the field that it is for; unknown fields are the recipe's to refuse."""
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
    if value is not None and BlockFormat in kinds:
        return format_of(value)
    settings = next((kind for kind in kinds if is_dataclass(kind)), None)
    if settings and isinstance(value, dict):
        known = [field.name for field in fields(settings)]
        wrong = sorted(set(value) - set(known))
        if wrong:
            raise Fp4ReproError(f"{name} has no {wrong[0]!r}; it has {', '.join(known)}")
        hints = get_type_hints(settings)
        return settings(**{k: _typed(f"{name}.{k}", v, hints[k]) for k, v in value.items()})
    value = tuple(value) if isinstance(value, list) else value
    if not _fits(value, hint):
        raise Fp4ReproError(f"{name} cannot be {value!r}: it takes {_said(hint)}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of a field's type; what a type does not say is the recipe's to refuse."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return any(_fits(value, kind) for kind in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _said(hint: Any) -> str:
    """A type in words."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return " or ".join(_said(kind) for kind in get_args(hint))
    if get_origin(hint) is tuple:
        return "a list"
    if is_dataclass(hint):
        return f"fields ({', '.join(field.name for field in fields(hint))})"
    names = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def format_of(value: str | dict[str, Any]) -> BlockFormat:
    """A format by its name, `-<rows>x<columns>` behind it for another block, or such a name as `format`
    beside other fields of `BlockFormat`."""
    if isinstance(value, dict):
        changes = dict(value)
        made = format_of(changes.pop("format", ""))
        wrong = sorted(set(changes) - {field.name for field in fields(BlockFormat)})
        if wrong:
            raise Fp4ReproError(f"a format has no field {wrong[0]!r}")
        return made.replace(**changes)
    name, block = re.fullmatch(r"(.*?)(?:-(\d+x\d+))?", str(value)).groups()
    if name not in FORMATS:
        raise Fp4ReproError(
            f"no format is named {value!r}; known: {', '.join(FORMATS)}, with a block behind it "
            "(nvfp4-16x16) or without, and null for BF16"
        )
    return FORMATS[name].with_block(*map(int, block.split("x"))) if block else FORMATS[name]
