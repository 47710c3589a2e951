"""Deliberate faults, each of which a named test of the suite must catch: a test of the tests.

A mutation rewrites a snippet of one function's source, or a value, for as long as one test runs. The
test must pass without it and fail with it (by an assertion: a crash would not count). The mutants are
in mutants.py. `python tests/mutations.py` runs all and writes the table docs/mutations.md.
"""

import __future__

import importlib
import inspect
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from eagerly import run_eagerly

Patch = Callable[[pytest.MonkeyPatch], None]
TABLE = pathlib.Path(__file__).parents[1] / "docs" / "mutations.md"


class Stale(Exception):
    """A mutation that no longer fits the code."""


@dataclass(frozen=True)
class Check:
    """A test of the suite with its arguments; a `monkeypatch` is supplied where it takes one."""

    function: Callable
    arguments: tuple = ()

    @property
    def label(self) -> str:
        shown = ", ".join(_short(a) for a in self.arguments)
        return f"{self.function.__module__}.{self.function.__name__}" + (f"({shown})" if shown else "")

    def fails(self, patches: tuple[Patch, ...] = ()) -> bool:
        """Whether an assertion of the test fails, under patches."""
        with pytest.MonkeyPatch.context() as patch:
            run_eagerly(patch)
            for change in patches:
                change(patch)
            extra = {"monkeypatch": patch} if "monkeypatch" in _parameters(self.function) else {}
            try:
                self.function(*self.arguments, **extra)
            except (AssertionError, pytest.fail.Exception):
                return True
            return False


@dataclass(frozen=True)
class Mutation:
    name: str
    patches: tuple[Patch, ...]
    check: Check
    what: str


def _short(value) -> str:
    return getattr(value, "name", None) or repr(value)


def _parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def modules() -> Iterator:
    """Those that may hold a function under its own name: the library's and the tests'."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "fp4repro" or name.startswith("test_"):
            yield module


def edit(place: str, *changes: tuple[str, str]) -> Patch:
    """Replace snippets in the source of `place`, e.g. "core.kernels:make_scales" or "...:Slot.of".
    Each must occur exactly once."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        path, _, dotted = place.partition(":")
        module = importlib.import_module(f"fp4repro.{path}")
        *parents, name = dotted.split(".")
        holder = getattr(module, parents[0]) if parents else module
        original = inspect.getattr_static(holder, name)
        function = getattr(original, "fget", None) or getattr(original, "__func__", original)
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        for old, new in changes:
            if source.count(old) != 1:
                raise Stale(f"{place}: {old!r} occurs {source.count(old)} times: renew this mutation")
            source = source.replace(old, new)
        made: dict = {}
        code = compile(source, f"<mutated {place}>", "exec", __future__.annotations.compiler_flag)
        exec(code, vars(module), made)
        if parents:
            patch.setattr(holder, name, made[name])
        else:
            replace_everywhere(patch, original, made[name])

    return apply


def replace_everywhere(patch: pytest.MonkeyPatch, original, new) -> None:
    """Under whatever name it was imported, and as a value of a module's tables."""
    for module in modules():
        for name, value in list(vars(module).items()):
            if value is original:
                patch.setattr(module, name, new)
            elif isinstance(value, dict) and name.isupper():
                for key, entry in list(value.items()):
                    if entry is original:
                        patch.setitem(value, key, new)


def mutate(name: str, check: Check, place: str, *changes: tuple[str, str], also=(), what="") -> Mutation:
    """One fault in one function (`also`: further edits); `what` is said by the snippets if not given."""
    said = what or "; ".join(f"`{_one_line(old)}` becomes `{_one_line(new)}`" for old, new in changes)
    patches = (edit(place, *changes), *(edit(p, *c) for p, *c in also))
    return Mutation(name, patches, check, f"{place.partition(':')[2]}: {said}")


def _one_line(code: str) -> str:
    return " ".join(code.split()).replace("|", "\\|")


def run(mutation: Mutation) -> None:
    """Raise AssertionError unless the check passes on the code as it is and fails on the mutant."""
    assert not mutation.check.fails(), f"{mutation.check.label} fails without any mutation"
    assert mutation.check.fails(mutation.patches), f"{mutation.name} survived {mutation.check.label}"


def table(mutations: list[Mutation]) -> str:
    head = (
        "# Deliberate faults and the tests that catch them\n\n"
        f"{len(mutations)} mutants of the code, each caught by the test named beside it "
        "(`python tests/mutations.py` runs them and writes this table; `tests/test_mutations.py` fails "
        "when one survives, or when its test fails without it).\n\n"
        "| fault | what was changed | caught by |\n| --- | --- | --- |\n"
    )
    rows = (f"| {m.name} | {m.what} | `{_one_line(m.check.label)}` |\n" for m in mutations)
    return head + "".join(rows)


def main() -> None:
    from mutants import MUTATIONS

    from fp4repro.files import atomic_write

    for mutation in MUTATIONS:
        run(mutation)
        print(f"caught: {mutation.name} by {mutation.check.label}")
    with atomic_write(TABLE) as path:
        path.write_text(table(MUTATIONS))
    print(f"{len(MUTATIONS)} of {len(MUTATIONS)} mutants caught; wrote {TABLE}")


if __name__ == "__main__":
    main()
