"""`python -m fp4repro.publish --scale FILE`: a scale's results as a folder that stands by itself.

results/published/<date>-<commit>/ holds the tables (CSV, Markdown, LaTeX), the figures (PNG, SVG, PDF), the
raw rows that the tables were made from, a table of the claims, one HTML report, the configuration, the
environment, an RO-Crate description, and the checksum of each file in the form that `sha256sum -c` reads.
Weights, token files and logs stay behind. Planned tables that are not there, or not among those that
`--tables` names, are listed as missing. `python -m fp4repro.verify` checks a folder.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp4repro.ablations import ABLATIONS, FULLSTACK
from fp4repro.config import BENCHMARKS, Scale, load_scale
from fp4repro.crate import crate_metadata
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.files import atomic_write, sha256
from fp4repro.report.claims import CLAIMS, claims_markdown
from fp4repro.report.html import html_report
from fp4repro.report.latex import latex_tables
from fp4repro.report.registry import TABLES, planned_tables
from fp4repro.report.schema import parse_rows, write_rows
from fp4repro.report.tables import versions

MANIFEST, CHECKSUMS, REPORT, CRATE = "manifest.json", "checksums.txt", "report.html", "ro-crate-metadata.json"
RAW = "raw"  # measurements that are tables themselves: a second copy, which a table is compared with
PUBLISHED = Path("results/published")
# The folders that hold the raw rows of a table; the rest are measurements themselves.
ROWS_OF = {
    "pretrain": ("pretrain",),
    "ablations": ("ablations", "branches", "pretrain"),
    "fullstack": ("fullstack", "branches", "pretrain"),
    "evals": ("evals",),
    "evals_paired": ("evals",),
    "fidelity": ("fidelity",),
    "sensitivity": ("sensitivity",),
}
# Figures, and all that is text and small. Logs, timings and notes of the workflow are not results.
KEPT = (".csv", ".json", ".md", ".png", ".svg", ".pdf")
LEFT = ("logs", "benchmarks", ".snakemake")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.publish", description=__doc__.split("\n\n")[0])
    parser.add_argument("--scale", type=Path, required=True, help="a file of configs/scales")
    parser.add_argument("--results", type=Path, help="folder of the results; results/<scale> by default")
    parser.add_argument("--published", type=Path, default=Path("configs/published.yaml"))
    parser.add_argument("--tables", nargs="+", help="these alone, by name; all that are there by default")
    parser.add_argument("--out", type=Path, help="folder to write; <date>-<commit> in results/published")
    parser.add_argument("--receipt", type=Path, help="file that the folder's path is written to")
    arguments = parser.parse_args()
    scale = load_scale(arguments.scale)
    results = arguments.results or Path("results") / scale.scale
    commit = commit_of(results, arguments.tables)
    out = arguments.out or PUBLISHED / f"{datetime.date.today().isoformat()}-{commit[:7]}"
    configs = [arguments.scale, arguments.published, ABLATIONS, FULLSTACK, BENCHMARKS, scale.model_path]
    publish(results, scale, configs, out, commit, arguments.tables)
    if arguments.receipt:
        with atomic_write(arguments.receipt) as temporary:
            temporary.write_text(f"{out}\n", encoding="utf-8")
    missing = json.loads((out / MANIFEST).read_text(encoding="utf-8"))["missing"]
    print(
        f"{out}: {len(read_checksums(out))} files" + (f"; missing: {', '.join(missing)}" if missing else "")
    )


def commit_of(results: Path, chosen: Sequence[str] | None = None) -> str:
    """The commit that the tables name; several are refused, since a folder is of one."""
    tables = [path for path in sorted((results / "tables").glob("*.csv")) if _among(path.stem, chosen)]
    if unknown := sorted(set(chosen or ()) - {path.stem for path in tables}):
        raise Fp4ReproError(
            f"{results / 'tables'} has no table {unknown[0]}: run its experiment, or leave it out"
        )
    if not tables:
        raise Fp4ReproError(f"{results / 'tables'} has no table to publish: run snakemake first")
    commits = versions([row for path in tables for row in parse_rows(path)], "commit")
    if " and " in commits:
        raise Fp4ReproError(
            f"the tables of {results} are of the commits {commits}: run what is older again, so that they "
            "are of one, or name those of one with --tables"
        )
    return commits or "unknown"


def publish(
    results: Path,
    scale: Scale,
    configs: list[Path],
    out: Path,
    commit: str,
    chosen: Sequence[str] | None = None,
) -> None:
    """Write the folder whole; one that is there already is refused."""
    if out.exists():
        raise Fp4ReproError(f"{out} is there already: remove it, or name another folder with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = out.with_name(f".{out.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    for path in _kept(results, chosen):
        _copy(path, made / path.relative_to(results))
    for path in configs:
        _copy(path, made / "configs" / path.name)
    tables = sorted((made / "tables").glob("*.csv"))
    for path in tables:
        if path.stem not in TABLES or TABLES[path.stem].rows is None:
            _copy(path, made / RAW / path.name)
    _write_claims(made, scale)
    for path in sorted((made / "tables").glob("*.md")):
        text = latex_tables(path.read_text(encoding="utf-8"))
        path.with_suffix(".tex").write_text(text, encoding="utf-8")
    _write_json(made / "environment.json", environment())
    there = {path.stem for path in tables}
    missing = [name for name in planned_tables(scale) if name not in there]
    today = datetime.date.today().isoformat()
    _write_json(made / MANIFEST, {"scale": scale.scale, "commit": commit, "date": today, "missing": missing})
    (made / REPORT).write_text(html_report(made, scale.description), encoding="utf-8")
    _write_json(made / CRATE, crate_metadata(made, scale.scale, today))
    lines = [f"{sha256(made / name)}  {name}\n" for name in _files(made)]
    (made / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    made.rename(out)


def _write_claims(made: Path, scale: Scale) -> None:
    """The claims that the folder's tables speak of, if there are any."""
    rows = TABLES[CLAIMS].rows(made, scale, [])
    if rows:
        write_rows(made / "tables" / f"{CLAIMS}.csv", rows)
        (made / "tables" / f"{CLAIMS}.md").write_text(claims_markdown(rows), encoding="utf-8")


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _among(name: str, chosen: Sequence[str] | None) -> bool:
    """Whether a table, or a figure of one, is to be published."""
    return chosen is None or any(name == table or name.startswith(f"{table}_") for table in chosen)


def _kept(results: Path, chosen: Sequence[str] | None) -> Iterator[Path]:
    for path in sorted(results.rglob("*")):
        place = path.relative_to(results).parts
        left = place[0] in LEFT or any(part.startswith(".") for part in place) or len(place) == 1
        if place[0] in ("tables", "figures"):
            left = left or path.stem == CLAIMS or not _among(path.stem, chosen)
        elif chosen is not None:
            left = left or not any(place[0] in ROWS_OF.get(name, ()) for name in chosen)
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
