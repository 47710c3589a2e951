"""The table of docs/architecture.md as a test: a part imports from those above it only."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "fp4repro"
# What each part may import besides itself; `public` stands for `import fp4repro` and its names.
ALLOWED = {
    "errors": set(),
    "files": {"errors"},
    "schemas": {"errors"},
    "core": {"errors", "files"},
    "recipes": {"errors", "core"},
    "layers": {"errors", "core", "recipes", "attention"},
    "backends": {"errors", "core", "recipes", "layers"},
    "export": {"errors", "files", "core", "layers"},
    "attention": {"errors", "core", "recipes"},
    "__init__": {"errors", "core", "recipes", "layers", "attention"},
    "optim": {"errors", "core", "recipes"},
    "models": {"errors", "files"},
    "ablations": {"errors", "schemas", "core.formats", "recipes"},
    "plans": {"errors"},
    "config": {"errors", "schemas", "recipes", "models", "ablations", "plans"},
    "data": {"errors", "files", "config"},
    "report": {"errors", "files", "schemas", "recipes", "ablations", "config"},
    "train": {
        "plans",
        *("public", "errors", "files", "core.compiled", "core.lost", "core.quantize", "layers", "optim"),
        *("models", "ablations", "config", "data", "report.schema"),
    },
    "pretrained": {"errors", "files"},
    "evals": {
        *("public", "errors", "files", "core.compiled", "recipes", "config", "data"),
        *("report", "train.provenance", "fidelity.tensors", "pretrained"),
    },
    "fidelity": {
        *("ablations", "errors", "core", "recipes", "layers", "models", "config", "data", "report"),
        *("train.provenance", "pretrained"),
    },
    "sensitivity": {"errors", "recipes", "config", "report", "train.provenance", "pretrained", "fidelity"},
    "roofline": {"errors", "core", "recipes", "layers", "models", "config", "report"},
    "memory": {
        *("public", "errors", "core", "recipes", "optim", "models", "config", "report"),
        *("train.provenance", "train.held", "roofline"),
    },
    "budget": {
        *("errors", "ablations", "recipes", "config", "report", "train", "roofline", "memory"),
    },
    "bench": {
        *("public", "errors", "core", "recipes", "layers", "backends", "optim", "models", "config"),
        *("report", "train", "roofline"),
    },
    "fullstack": {
        *("public", "errors", "core", "recipes", "layers", "attention", "optim", "models", "config"),
        *("data", "report", "train.provenance", "fidelity", "bench.timing"),
    },
    "verify": {"errors", "files", "config", "report", "publish"},
    "archive": {"errors", "files", "verify"},
    "crate": {"errors"},
    "publish": {"errors", "files", "ablations", "config", "report", "crate"},
}


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fp4repro":
            inside = node.module.removeprefix("fp4repro").removeprefix(".")
            # `from fp4repro.report import schema` imports fp4repro.report.schema
            found += [f"{inside}.{a.name}" for a in node.names] if inside else ["public"]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] == "fp4repro"]
            found += [n.removeprefix("fp4repro").removeprefix(".") or "public" for n in names]
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_upwards(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert part in ALLOWED, f"{part} is in no row: add it here and in docs/architecture.md"
    allowed = ALLOWED[part] | {part}
    for module in imports(path):
        assert any(module == a or module.startswith(a + ".") for a in allowed), (
            f"{part} may not import {module}: see the table in docs/architecture.md"
        )


def test_the_model_never_mentions_fp4():
    """Docstrings may name the paper; no name, attribute or argument of the code may."""
    for path in (ROOT / "models").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for value in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "arg", "")):
                assert value == "Fp4ReproError" or not re.search(r"fp4|quant", str(value).lower()), path


def test_the_rule_can_fail():
    assert imports(ROOT / "train" / "loop.py")  # what is parsed is not empty
    assert not any(m == "train" or m.startswith("train.") for m in ALLOWED["core"])
