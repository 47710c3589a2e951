"""Published figures, read from `configs/published.yaml`, so that each stands in one place."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4repro.config import SCHEMAS, check, read_yaml
from fp4repro.errors import Fp4ReproError


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One figure; the head of the YAML file explains the fields."""

    id: str
    value: float
    relation: str
    unit: str
    what: str
    setting: str
    source: str
    confidence: str
    losses: tuple[float, float] | None = None
    compares: tuple[str, str] | None = None  # recipe, baseline
    case: dict[str, Any] | None = None  # what was measured, for a model to predict it
    accuracy: tuple[str, str] | None = None  # benchmark or composite, recipe

    def __str__(self) -> str:
        words = {"=": "", "about": "about ", "<": "below ", ">": "above "}
        return f"{words[self.relation]}{self.value:g} {self.unit}"


def load_published(path: str | os.PathLike) -> list[Published]:
    """The file's entries, in its order; one that breaks its schema is refused with a sentence."""
    path = Path(path)
    entries = read_yaml(path)
    check(entries, read_yaml(SCHEMAS / "published.schema.yaml"), path)
    ids = [entry["id"] for entry in entries]
    repeated = sorted({name for name in ids if ids.count(name) > 1})
    if repeated:
        raise Fp4ReproError(f"{path}: the id {repeated[0]} stands there more than once")
    return [_entry(**entry) for entry in entries]


def _entry(
    compares: dict | None = None, losses: list | None = None, accuracy: dict | None = None, **rest
) -> Published:
    return Published(
        compares=compares and (compares["recipe"], compares["baseline"]),
        accuracy=accuracy and (accuracy["benchmark"], accuracy["arm"]),
        losses=losses and tuple(losses),
        **rest,
    )
