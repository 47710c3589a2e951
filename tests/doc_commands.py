"""The commands that the README and the docs print, and whether each would work.

Fenced shell blocks and `code` in the text whose first word is a known program are commands. Each is checked
in the cheapest way that can still fail:

plan     `snakemake -n` of the same targets and configuration; of a cluster's profile, that it is there
parse    the stage's own argument parser reads it, and stops before it begins
make     `make -n`
shape    installations and activations: the extra, the file or the module that they name exists
run      for real: what takes a second and needs nothing (QUICK)
"""

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = ("python", "python3.11", "snakemake", "make", "torchrun", "pip", "mkdocs", ".")
# Stages whose commands are also run for real: no training, no model, no network.
QUICK = ("roofline", "memory", "verify")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PLACEHOLDERS = {
    "FOLDER": "results/published/2026-12-01-75a402c",
    "FILE": "configs/scales/smoke.yaml",
    "MODEL": "tiny",
    "STUDY": "projections",
    "S.yaml": "smoke.yaml",
    "[hub]": "[hub]",
}


def texts() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[str]:
    """Every command of a Markdown text, in order, without comments."""
    found, fence = [], None
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fence = None if fence is not None else line.strip("` ")
            continue
        if fence in ("", "sh", "bash", "shell", "console"):
            found += re.split(r" && ", line.partition("#")[0].strip().removeprefix("$ "))
        elif fence is None:
            inline = re.findall(r"`([^`]+)`", line)
            found += [part for code in inline if " " in code for part in code.split(" && ")]
    return [c for c in dict.fromkeys(found) if c and c.split()[0] in PROGRAMS and "..." not in c]


class Parsed(Exception):
    """A stage has read its arguments."""


def fault(command: str, plan, make) -> str:
    """Why a command would not work, or nothing. `plan` runs `snakemake -n` and `make` runs `make -n` with
    arguments; each returns exit code and output."""
    words = [_filled(word) for word in shlex.split(command)]
    program, rest = words[0], words[1:]
    if program == "snakemake":
        if "--workflow-profile" in rest:  # needs the executor's plugin
            profile = rest[rest.index("--workflow-profile") + 1]
            rest = [word for word in rest if word not in ("--workflow-profile", profile)]
            if not (ROOT / profile / "config.yaml").is_file():
                return f"there is no profile {profile}"
        code, output = plan(*(word for word in rest if word != "-n"))
        return "" if code == 0 else output
    if program == "make":
        code, output = make(*rest)
        return "" if code == 0 else output
    if program == "torchrun":
        return _module(rest[rest.index("-m") :])
    if program in ("python", "python3.11") and rest[0] == "-m":
        if rest[1] in ("venv", "pytest"):
            missing = [w for w in rest[2:] if w.endswith(".py") and not (ROOT / w).is_file()]
            return f"{missing[0]} does not exist" if missing else ""
        return _module(rest)
    if program in ("python", "python3.11"):
        return "" if (ROOT / rest[0]).is_file() else f"{rest[0]} does not exist"
    if program == "pip":
        named = re.findall(r"\[(\w+)\]", " ".join(rest))
        return "".join(f"there is no extra {name}" for name in named if name not in EXTRAS)
    if program == ".":
        return "" if rest == [".venv/bin/activate"] else f"{rest} is no environment of this project"
    return f"no test knows the program {program}"


def _filled(word: str) -> str:
    for name, value in PLACEHOLDERS.items():
        word = word.replace(name, value)
    return word


def _module(rest: list[str]) -> str:
    """Whether a stage's own parser takes its arguments; `[...]` marks what may be left out."""
    module, arguments = rest[1], [word.strip("[](),") for word in rest[2:]]
    if importlib.util.find_spec(module) is None:
        return f"there is no module {module}"
    if "or" in arguments:
        return ""  # a sentence about alternatives
    return _parse(module, [word for word in arguments if word] or ["--help"])


def _parse(module: str, arguments: list[str]) -> str:
    parse_args, argv = argparse.ArgumentParser.parse_args, sys.argv

    def stop(self, args=None, namespace=None):
        raise Parsed(parse_args(self, args, namespace))

    argparse.ArgumentParser.parse_args = stop
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except Parsed:
        return ""
    except SystemExit as end:
        return f"{module} {' '.join(arguments)}: its parser ends with {end.code}" if end.code else ""
    finally:
        argparse.ArgumentParser.parse_args, sys.argv = parse_args, argv
    return "" if arguments == ["--help"] else f"{module} takes no arguments"
