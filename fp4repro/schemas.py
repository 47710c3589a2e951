"""YAML files against their JSON schemas: every mistake is one sentence, which says what to write.

A file that people write (scales, models' overrides, ablations, published figures) is read by
`read_yaml`, compared with a schema of workflow/schemas by `check`, and filled in by `with_defaults`.
"""

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from fp4repro.errors import Fp4ReproError

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "workflow" / "schemas"


# Half a second of each command's start is the parser in Python where libyaml's is not at hand.
_Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
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
    raise_all(
        [f"{path}: {where} is {value}, which is not a number" for where, value in _not_finite(document)]
    )
    validator = jsonschema.Draft202012Validator(schema)
    errors = sorted(validator.iter_errors(document), key=lambda e: [str(p) for p in e.absolute_path])
    raise_all([f"{path}: {sentence}" for error in errors for sentence in _sentences(error)])


def _not_finite(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Numbers that YAML can write and no setting can be: .nan and .inf."""
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _not_finite(item, f"{where}.{key}" if where else str(key))


def raise_all(sentences: list[str]) -> None:
    """Raise all sentences together, one a line; none, and nothing happens."""
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


def with_defaults(value: Any, schema: dict, root: dict) -> Any:
    """A copy of a valid document, in which a key that is missing has its schema's default."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]] | schema
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") or schema.get("else", {}).get("properties", {})
    missing = {k: s["default"] for k, s in properties.items() if k not in value and "default" in s}
    others = schema.get("additionalProperties") or {}  # the schema of keys that the file names
    return {k: with_defaults(v, properties.get(k, others), root) for k, v in (value | missing).items()}
