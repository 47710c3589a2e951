"""README and docs: every command works, every figure is traced, every link leads somewhere."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import doc_commands as docs
import pytest
import torch
from eagerly import run_eagerly
from test_workflow import Workflow

from fp4repro.errors import Fp4ReproError
from fp4repro.report.include import include
from fp4repro.report.published import load_published
from fp4repro.report.trace import known_values, published_csvs, untraced

ROOT = docs.ROOT
COMMANDS = list(dict.fromkeys(c for path in docs.texts() for c in docs.commands(path.read_text())))
SHOWN = [path.name for path in docs.texts()]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """`snakemake -n` in a copy of the workflow; the same arguments are planned once."""
    workflow, planned = Workflow(tmp_path_factory.mktemp("docs")), {}

    def run(*arguments: str) -> tuple[int, str]:
        if arguments not in planned:
            planned[arguments] = workflow.run("-n", *arguments, "--quiet", "all")
        return planned[arguments]

    return run


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)

    def run(*arguments: str) -> tuple[int, str]:
        command = ["make", "--dry-run", *arguments]
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_docs(command, plan, make):
    assert docs.fault(command, plan, make) == ""


def _quick() -> list[str]:
    found = [c for c in COMMANDS if c.startswith("python -m fp4repro.")]
    ready = [c for c in found if not re.search(r"\b[A-Z]{1,}\b(?!\d)", re.sub(r"[A-Z]+\d+|README", "", c))]
    of = {c.split()[2].removeprefix("fp4repro."): c for c in ready}
    return [of[stage] for stage in docs.QUICK]  # one of each


@pytest.mark.parametrize("command", _quick())
def test_quick_commands_run(command):
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_commands_are_found_and_mistakes_in_them(plan, make):
    """The test above can fail: a wrong flag, target, extra, module, program."""
    text = (
        "a `make smoke` b\n```\npython -m fp4repro.roofline --x 1 && ls  # why\n```\n```python\nmake x\n```\n"
    )
    assert docs.commands(text) == ["make smoke", "python -m fp4repro.roofline --x 1"]
    assert len(COMMANDS) > 50
    for command in COMMANDS:
        words = shlex.split(command)
        if words[:2] == ["python", "-m"] and words[2].startswith("fp4repro.") and "or" not in words:
            assert docs.fault(f"{command} --no-such-flag 1", plan, make), command
    for wrong in (
        "python -m fp4repro.roofline --model",
        "python -m fp4repro.rooflines",
        "python tests/none.py",
        "python -m pytest tests/test_none.py",
        "snakemake no_such_target",
        "snakemake pretrain --config scale=none",
        "snakemake --workflow-profile profiles/none",
        "make no_such_target",
        "pip install -e '.[none]'",
        ". .venv/bin/activat",
        "cargo build",
    ):
        assert docs.fault(wrong, plan, make), wrong


def test_python_of_the_docs_runs(monkeypatch):
    run_eagerly(monkeypatch)
    torch.manual_seed(0)
    for path in docs.texts():
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        names = {"model": model, "batches": [0]}  # what the README takes as given
        for block in blocks:
            exec(compile(block, str(path), "exec"), names)


def test_every_figure_is_traced_and_a_changed_one_is_named():
    values = known_values(
        published_csvs(ROOT / "results/published"), load_published(ROOT / "configs/published.yaml")
    )
    for path in docs.texts():
        assert list(untraced(path.read_text(), values)) == [], path
    speed = (ROOT / "docs" / "speed.md").read_text()
    # Any figure of a table will do, so that a page may be measured again.
    cell = re.search(r"\| \d+\.\d+ \|", speed)[0]
    assert [figure for _, figure in untraced(speed.replace(cell, "| 23.4417 |", 1), values)] == ["23.4417"]


def test_tables_of_the_readme_are_those_of_published_folders():
    changed = 0
    for path in docs.texts():
        text = path.read_text()
        assert include(text, ROOT) == text, f"{path}: python -m fp4repro.report include {path.name}"
        start = text.find("<!-- table:")
        if start >= 0:
            spot = text.index("0.", start)
            assert include(text[:spot] + "7." + text[spot + 2 :], ROOT) == text
            changed += 1
    assert changed


def test_a_table_comment_that_cannot_be_read_is_a_sentence(tmp_path):
    table = "<!-- table: t.md 1 (2) -->\nold\n<!-- end of table -->"
    with pytest.raises(Fp4ReproError, match="does not exist"):
        include(table, tmp_path)
    (tmp_path / "t.md").write_text("# T\n\n| a | b |\n| - | - |\n| 1 | 2 |\n")
    made = include(f"x\n{table}\ny", tmp_path)
    assert made == "x\n<!-- table: t.md 1 (2) -->\n| b |\n| --- |\n| 2 |\n<!-- end of table -->\ny"
    for wrong, said in (("t.md 2", "1 tables"), ("t.md 1 (3)", "2 columns"), ("t.md one", "cannot be read")):
        with pytest.raises(Fp4ReproError, match=said):
            include(table.replace("t.md 1 (2)", wrong), tmp_path)


@pytest.mark.parametrize("name", SHOWN)
def test_links_lead_somewhere(name):
    path = next(path for path in docs.texts() if path.name == name)
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_the_site_is_built_strictly(tmp_path):
    pytest.importorskip("material")

    def build(config: Path) -> subprocess.CompletedProcess:
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
        ]  # --quiet would hide warnings from --strict
        command += ["--config-file", str(config), "--site-dir", str(tmp_path / "site")]
        return subprocess.run(command, capture_output=True, text=True)

    done = build(ROOT / "mkdocs.yml")
    assert done.returncode == 0, done.stderr
    assert "Which claims" not in done.stdout and (tmp_path / "site" / "core" / "index.html").is_file()
    for link in ("nowhere.md", "../nowhere.py"):
        folder = shutil.copytree(ROOT / "docs", tmp_path / "broken" / "docs", dirs_exist_ok=True)
        shutil.copy(ROOT / "mkdocs.yml", folder.parent)
        (folder / "core.md").write_text(f"[a]({link})\n")
        assert build(folder.parent / "mkdocs.yml").returncode != 0
