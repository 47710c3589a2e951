"""`python -m fp4repro.publish --scale FILE`: a scale's results as a folder that stands by itself.

results/published/<date>-<commit>/ holds the tables (CSV, Markdown, LaTeX), the figures, the raw rows that
they were made from, the configuration, the environment, and the checksum of each file in the form that
`sha256sum -c` reads. Weights, token files and logs stay behind. `python -m fp4repro.verify` checks it.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from fp4repro.ablations import ABLATIONS, FULLSTACK
from fp4repro.config import BENCHMARKS, Scale, load_scale
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.files import atomic_write, sha256
from fp4repro.report.latex import latex_tables
from fp4repro.report.schema import parse_rows
from fp4repro.report.tables import versions

MANIFEST, CHECKSUMS = "manifest.json", "checksums.txt"
PUBLISHED = Path("results/published")
# Figures, and all that is text and small. Logs, timings and notes of the workflow are not results.
KEPT = (".csv", ".json", ".md", ".png", ".svg", ".pdf")
LEFT = ("logs", "benchmarks", ".snakemake")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.publish", description=__doc__.split("\n\n")[0])
    parser.add_argument("--scale", type=Path, required=True, help="a file of configs/scales")
    parser.add_argument("--results", type=Path, help="folder of the results; results/<scale> by default")
    parser.add_argument("--published", type=Path, default=Path("configs/published.yaml"))
    parser.add_argument("--out", type=Path, help="folder to write; <date>-<commit> in results/published")
    parser.add_argument("--receipt", type=Path, help="file that the folder's path is written to")
    arguments = parser.parse_args()
    scale = load_scale(arguments.scale)
    results = arguments.results or Path("results") / scale.scale
    commit = commit_of(results)
    out = arguments.out or PUBLISHED / f"{datetime.date.today().isoformat()}-{commit[:7]}"
    configs = [arguments.scale, arguments.published, ABLATIONS, FULLSTACK, BENCHMARKS, scale.model_path]
    publish(results, scale, configs, out, commit)
    if arguments.receipt:
        with atomic_write(arguments.receipt) as temporary:
            temporary.write_text(f"{out}\n", encoding="utf-8")
    print(f"{out}: {len(read_checksums(out))} files")


def commit_of(results: Path) -> str:
    """The commit that the tables name; several are refused, since a folder is of one."""
    tables = sorted((results / "tables").glob("*.csv"))
    if not tables:
        raise Fp4ReproError(f"{results / 'tables'} has no table to publish: run snakemake first")
    commits = versions([row for path in tables for row in parse_rows(path)], "commit")
    if " and " in commits:
        raise Fp4ReproError(
            f"the tables of {results} are of the commits {commits}: run what is older again, so that they "
            "are of one"
        )
    return commits or "unknown"


def publish(results: Path, scale: Scale, configs: list[Path], out: Path, commit: str) -> None:
    """Write the folder whole; one that is there already is refused."""
    if out.exists():
        raise Fp4ReproError(f"{out} is there already: remove it, or name another folder with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = out.with_name(f".{out.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    for path in _kept(results):
        _copy(path, made / path.relative_to(results))
    for path in configs:
        _copy(path, made / "configs" / path.name)
    for path in sorted((made / "tables").glob("*.md")):
        text = latex_tables(path.read_text(encoding="utf-8"))
        path.with_suffix(".tex").write_text(text, encoding="utf-8")
    _write_json(made / "environment.json", environment())
    about = {"scale": scale.scale, "commit": commit, "date": datetime.date.today().isoformat()}
    _write_json(made / MANIFEST, about)
    files = sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())
    lines = [f"{sha256(made / name)}  {name}\n" for name in files]
    (made / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    made.rename(out)


def _kept(results: Path) -> Iterator[Path]:
    for path in sorted(results.rglob("*")):
        place = path.relative_to(results).parts
        left = place[0] in LEFT or any(part.startswith(".") for part in place)
        if path.is_file() and path.suffix in KEPT and not left and path.name != "tokenizer.json":
            yield path


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def environment() -> dict:
    """Python, machine and the version of every installed package."""
    packages = {found.name: found.version for found in importlib.metadata.distributions()}
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def read_checksums(folder: Path) -> dict[str, str]:
    """SHA-256 by file."""
    lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


if __name__ == "__main__":
    run_stage("fp4repro.publish", main)
