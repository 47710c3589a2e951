"""The project's files agree with each other, and `make` speaks in sentences."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]]


@pytest.fixture
def copy(tmp_path):
    """The files that `make env` reads, in a folder of their own."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    # Variables of a make that runs these tests would reach the inner one.
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "PYTHON", "SCALE", "ARGS")
    environment = {key: value for key, value in os.environ.items() if key not in outer}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_environment_yml_names_the_project_and_no_package_twice():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, packages = environment["dependencies"]
    version = python.removeprefix("python=")
    assert version in SpecifierSet(PROJECT["requires-python"])
    assert f">={version}" == PROJECT["requires-python"]
    assert pip == "pip"
    assert packages == {"pip": ["-c constraints.txt", "-e .[test]"]}


def test_constraints_pin_every_dependency_within_what_the_project_asks():
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = {canonicalize_name(name): Version(version) for name, version in (x.split("==") for x in lines)}
    for requirement in REQUIRED:
        name = canonicalize_name(requirement.name)
        if name == "torch":  # pinned where it is asked for: its builds differ by machine
            assert re.fullmatch(r"==\d+\.\d+\.\d+", str(requirement.specifier))
            assert name not in pins
        else:
            assert pins[name] in requirement.specifier, name
    assert not [name for name in pins if name.startswith("nvidia")]


def test_licence_is_apache_in_full():
    text = (ROOT / "LICENSE").read_bytes()
    known = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert hashlib.sha256(text).hexdigest() == known
    assert PROJECT["license"]["text"] == "Apache-2.0"


def test_profiles_rerun_for_settings_and_not_for_code():
    for path in (ROOT / "profiles").glob("*/config.yaml"):
        profile = yaml.safe_load(path.read_text())
        assert set(profile["rerun-triggers"]) == {"mtime", "params", "input"}, path
        assert profile["rerun-incomplete"] is True, path


def test_the_container_pins_what_the_project_asks_for():
    """The image of torch is the pinned one; the GPU extra's packages are pinned within what it allows."""
    text = (ROOT / "containers" / "Dockerfile").read_text()
    (torch_pin,) = [r.specifier for r in REQUIRED if r.name == "torch"]
    assert re.search(r"^FROM pytorch/pytorch:(\d+\.\d+\.\d+)-cuda", text, re.M).group(1) in torch_pin
    for requirement in map(Requirement, PROJECT["optional-dependencies"]["gpu"]):
        (version,) = re.findall(rf"{requirement.name}[^ ]*==([\d.]+)", text)
        assert version in requirement.specifier, requirement


def test_ci_runs_the_style_the_tests_and_the_pipeline():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line.strip() for line in script.read_text().splitlines()]
    order = [commands.index(line) for line in ("make env", "make test", "make smoke")]
    assert order == sorted(order)
    assert any("fp4repro.report check" in line for line in commands[order[-1] :])
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_make_without_a_fit_python_says_so(copy):
    for python in ("", "/nowhere/python3.11", "false"):
        done = make(copy, "env", f"PYTHON={python}")
        assert done.returncode != 0
        assert "make: fp4repro needs Python 3.11 or newer" in done.stderr
        assert "Traceback" not in done.stdout + done.stderr
    assert not (copy / ".venv").exists()


def test_make_without_the_venv_module_says_so(copy):
    python = copy / "python"
    python.write_text('#!/bin/sh\nif [ "$1" = -m ]; then exit 1; fi\n')
    python.chmod(0o755)
    done = make(copy, "env", f"PYTHON={python}")
    assert done.returncode != 0
    assert "cannot make a virtual environment" in done.stderr


def test_make_builds_a_broken_environment_again_and_leaves_a_whole_one(copy):
    (copy / ".venv" / "bin").mkdir(parents=True)
    stamp = copy / ".venv" / "installed"
    stamp.touch()  # newer than what it depends on
    assert "pip install" in make(copy, "--dry-run", "env").stdout
    python = copy / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    stamp.touch()
    assert "pip install" not in make(copy, "--dry-run", "env").stdout
    os.utime(copy / "constraints.txt", (stamp.stat().st_mtime + 1,) * 2)
    assert "pip install" in make(copy, "--dry-run", "env").stdout


def test_citation_and_archive_metadata_agree_with_the_project():
    """What CITATION.cff 1.2.0 and Zenodo require is there, and says the same."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    zenodo = json.loads((ROOT / ".zenodo.json").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and all(author.get("name") for author in citation["authors"])
    assert {"title", "description", "upload_type", "creators"} <= zenodo.keys()
    for name, wanted in (("version", PROJECT["version"]), ("license", PROJECT["license"]["text"])):
        assert citation[name] == zenodo[name] == wanted
    assert citation["title"] == zenodo["title"] and citation["keywords"] == zenodo["keywords"]
    assert [a["name"] for a in citation["authors"]] == [c["name"] for c in zenodo["creators"]]
    papers = [entry["identifiers"][0]["value"] for entry in citation["references"]]
    assert papers == [entry["identifier"] for entry in zenodo["related_identifiers"]]


def test_everything_that_the_code_imports_is_asked_for():
    """Templates, fonts and archives need packages that others bring along: they are named all the same."""
    asked = {canonicalize_name(r.name) for r in REQUIRED}
    assert {"jinja2", "fonttools", "rocrate", "mkdocs-material"} <= asked
    for extra, package in (("publish", "rocrate"), ("docs", "mkdocs-material")):
        (line,) = PROJECT["optional-dependencies"][extra]
        assert Requirement(line).name == package
