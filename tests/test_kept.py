"""Kernels that one process keeps are those that the next one loads, and nothing stale is ever loaded."""

import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from fp4repro.core import compiled as compiling
from fp4repro.core import kept


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where records lie, in a process that keeps them."""
    if not compiling.compiler_usable():
        pytest.skip("no C++ compiler for inductor")
    monkeypatch.setattr(kept, "_folder", lambda: tmp_path)
    monkeypatch.setattr(kept, "_everything", lambda: "this package")
    return tmp_path


def total(x):
    return (x * 2).sum(-1)


def both(x, y):
    return x + y, x - y


def across(x):
    return (x.abs() + 1).amax(1)


across.across_vectors = True


def process(function, *name):
    """The function as a process to come has it, and how often it compiles."""
    made = compiling._Compiled(function, *name)

    def run(*args):
        before = compiling.counts["kernels"]
        return made(*args), compiling.counts["kernels"] - before

    return run


def test_the_next_process_compiles_nothing(folder):
    x = torch.arange(96.0).view(6, 16)
    for function in (total, both, across):
        args = (x, x.flip(0)) if function is both else (x,)
        found, made = process(function, function.__name__)(*args)
        again, none = process(function, function.__name__)(*args)
        assert (made, none) == (1, 0)
        for a, b, want in zip(
            *(v if function is both else (v,) for v in (found, again, function(*args))), strict=True
        ):
            assert torch.equal(a, want) and torch.equal(b, want)
    assert len(list(folder.iterdir())) == 3


def test_what_tracing_assumed_is_kept_too(folder):
    """Equal sides, and a side of one, which broadcasts, are kernels of their own."""
    x, row = torch.arange(12.0).view(3, 4), torch.arange(4.0).view(1, 4)
    assert process(both, "both")(x, x)[1] == 1
    next_one = process(both, "both")
    for y, made in ((x[:2], None), (row, 1), (x, 0)):
        if made is not None:
            found, compiled = next_one(x, y)
            assert torch.equal(found[0], x + y) and torch.equal(found[1], x - y)
            assert compiled == made
    with pytest.raises(Exception, match=r"size|shape|broadcast"):
        process(both, "both")(x, x[:2])


@pytest.mark.parametrize("change", ["name", "dtype", "package", "threads"])
def test_another_key_is_another_kernel(folder, change, monkeypatch):
    x = torch.arange(32.0).view(2, 16)
    assert process(total, "total", 1)(x)[1] == 1
    if change == "package":
        monkeypatch.setattr(kept, "_everything", lambda: "this package, edited")
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    x = x.double() if change == "dtype" else x
    assert process(total, "total", 2 if change == "name" else 1)(x)[1] == 1


@pytest.mark.parametrize("damage", ["cut", "code", "field", "sides"])
def test_a_damaged_record_is_compiled_anew(folder, damage):
    x = torch.arange(32.0).view(2, 16)
    process(total, "total")(x)
    (path,) = folder.iterdir()
    text = path.read_text()
    held = json.loads(text)
    if damage == "code":
        held["source"] = "raise RuntimeError('no such kernel')"
    if damage == "field":
        del held["width"]
    if damage == "sides":
        held["assumed"] = "L['t0'] == 3"
    path.write_text(text[: len(text) // 2] if damage == "cut" else json.dumps(held))
    found, made = process(total, "total")(x)
    assert made == 1 and torch.equal(found, total(x))


def test_code_is_built_for_the_vectors_that_it_is_for(folder, monkeypatch):
    """Narrow code built for wide vectors reads past its rows."""
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    x = torch.randn(64, 16)
    process(across, "across")(x)
    (path,) = folder.iterdir()
    width = json.loads(path.read_text())["width"]
    assert width == compiling._width(True)
    told = []
    monkeypatch.setattr(
        PyCodeCache, "load", lambda _: told.append(config.cpp.simdlen) or SimpleNamespace(call=None)
    )
    kept.load(kept.Record(None, width, "True", [], {}, True))
    assert told == [width] and config.cpp.simdlen != width


def test_a_disk_that_refuses_is_no_fault(folder, monkeypatch):
    monkeypatch.setattr(kept, "_folder", lambda: folder / "file" / "below")
    (folder / "file").write_text("")
    x = torch.arange(32.0).view(2, 16)
    for _ in range(2):
        found, made = process(total, "total")(x)
        assert made == 1 and torch.equal(found, total(x))


@pytest.fixture
def everything(monkeypatch):
    """What `_everything` says in a program of this name, with sources this many seconds older than it."""
    newest = max(os.stat(f).st_mtime for f in kept.Path(kept.__file__).parents[1].rglob("*.py"))

    def told(program, older):
        monkeypatch.setitem(
            sys.modules, "__main__", SimpleNamespace(__spec__=program and SimpleNamespace(name=program))
        )
        monkeypatch.setattr(kept, "BEGAN", newest + older)
        return kept._everything.__wrapped__()

    return told


def test_only_this_package_s_command_lines_keep_kernels(everything):
    """In any other program a function may have been replaced in memory."""
    assert everything("fp4repro.train.__main__", 100)
    for other in (None, "pytest.__main__", "fp4repro_mine"):
        assert everything(other, 100) is None


def test_sources_edited_of_late_are_not_trusted(everything):
    """The process may have imported what they were before."""
    assert everything("fp4repro.train.__main__", kept.SETTLED + 1)
    assert everything("fp4repro.train.__main__", kept.SETTLED - 1) is None


def test_the_key_follows_every_source(monkeypatch, tmp_path, everything):
    package = tmp_path / "fp4repro"
    (package / "core").mkdir(parents=True)
    for name in ("core/kept.py", "core/kernels.py"):
        (package / name).write_text("x = 1\n")
        os.utime(package / name, (0, 0))
    monkeypatch.setattr(kept, "__file__", str(package / "core" / "kept.py"))
    before = everything("fp4repro.train.__main__", 100)
    assert before == everything("fp4repro.train.__main__", 100)
    (package / "core" / "kernels.py").write_text("x = 2\n")
    os.utime(package / "core" / "kernels.py", (0, 0))
    assert before != everything("fp4repro.train.__main__", 100)


def test_options_without_a_lasting_name_are_not_kept(folder):
    assert kept.key(("f", object()), (), [torch.ones(2)]) is None
    assert kept.key(("f", 1), (), [torch.ones(2)])
    assert dataclasses.is_dataclass(kept.Record)
