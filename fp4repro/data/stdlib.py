"""The running Python's standard library as a corpus: there on every machine, without any network.

Modules written in Python give their sources, docstrings and all; those built into the interpreter
have no source and give the docstrings of what they hold. Whole modules are held out.
"""

import importlib
import inspect
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from fp4repro.data.documents import Corpus, Document, held_out

# Installed packages are not the standard library, and its tests hold data more than text.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def load_stdlib() -> Corpus:
    documents = [*_sources(Path(sysconfig.get_path("stdlib"))), *_built_in()]
    return Corpus(
        f"standard library of Python {sys.version.split()[0]}, whole modules held out",
        tuple(document for document in documents if not held_out(document.name)),
        tuple(document for document in documents if held_out(document.name)),
    )


def _sources(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _SKIPPED.intersection(name.parts):
            with tokenize.open(path) as source:  # in the encoding that the module declares
                yield Document(name.as_posix(), source.read())


def _built_in() -> Iterator[Document]:
    for name in sorted(sys.builtin_module_names):
        module = importlib.import_module(name)
        # A dict keeps the order and drops what several names share.
        texts = dict.fromkeys([inspect.getdoc(module), *_docstrings(module)])
        yield Document(name, "\n\n".join(text for text in texts if text) + "\n")


def _docstrings(module: object) -> Iterator[str | None]:
    for _, member in inspect.getmembers(module, lambda m: inspect.isclass(m) or inspect.isbuiltin(m)):
        yield inspect.getdoc(member)
        if inspect.isclass(member):
            yield from (inspect.getdoc(m) for _, m in inspect.getmembers(member, inspect.isroutine))
