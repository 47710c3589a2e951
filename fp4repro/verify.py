"""`python -m fp4repro.verify FOLDER`: does a published folder agree with itself?

Each table is made anew from the folder's raw rows, by the functions that made it, and compared cell by
cell: the CSV, the Markdown and the LaTeX. Then every file is compared with its checksum. What does not
agree is named, a cell by its table, line and column.

A table whose checksum is right may differ from what is recomputed in the last digits, since another
machine's libraries may round otherwise; in one whose checksum is wrong, any digit counts.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp4repro.config import Scale, load_scale
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.files import sha256
from fp4repro.publish import CHECKSUMS, MANIFEST, RAW, read_checksums
from fp4repro.report.latex import latex_tables
from fp4repro.report.published import Published, load_published
from fp4repro.report.registry import TABLES, Table
from fp4repro.report.schema import COLUMNS, Row, parse_rows

RELATIVE = 1e-9  # what two machines' libraries may differ by
SHOWN = 40  # faults that are printed


@dataclass(frozen=True)
class Verdict:
    """What was found of one folder."""

    recomputed: tuple[str, ...]  # tables made anew from raw rows
    measured: tuple[str, ...]  # measurements: compared with their raw copy, made into Markdown
    unknown: tuple[str, ...]  # no entry of the registry: compared with their raw copy
    faults: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.verify", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder that python -m fp4repro.publish wrote")
    folder = parser.parse_args().folder
    verdict = verify(folder)
    for what, names in (
        ("recomputed from raw rows", verdict.recomputed),
        ("measurements, compared with their raw copy; made anew from them: the Markdown", verdict.measured),
        ("measurements that this version has no reader's table for", verdict.unknown),
    ):
        if names:
            print(f"{what}: {', '.join(names)}")
    if verdict.faults:
        shown, more = verdict.faults[:SHOWN], len(verdict.faults) - SHOWN
        rest = [f"... and {more} more"] if more > 0 else []
        raise Fp4ReproError("\n".join([f"{folder} does not agree with itself:", *shown, *rest]))
    print(f"{folder}: all tables and all {len(read_checksums(folder))} checksums agree")


def verify(folder: Path) -> Verdict:
    """Recompute every table of a folder; raises Fp4ReproError where it is none that was published."""
    for name in (MANIFEST, CHECKSUMS):
        if not (folder / name).is_file():
            raise Fp4ReproError(
                f"{folder} has no {name}: give a folder that python -m fp4repro.publish wrote"
            )
    about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    scale = load_scale(folder / "configs" / f"{about['scale']}.yaml")
    published = load_published(folder / "configs" / "published.yaml")
    broken = dict(_broken(folder))
    tables = {path.stem: path for path in sorted((folder / "tables").glob("*.csv"))}
    faults = [
        fault
        for name, path in tables.items()
        for fault in _table_faults(folder, name, path, scale, published, broken)
    ]
    return Verdict(
        recomputed=tuple(name for name in tables if name in TABLES and TABLES[name].rows),
        measured=tuple(name for name in tables if name in TABLES and not TABLES[name].rows),
        unknown=tuple(name for name in tables if name not in TABLES),
        faults=(*faults, *(f"{name}: {why}" for name, why in broken.items())),
    )


def _broken(folder: Path) -> Iterator[tuple[str, str]]:
    """Files that are not what their checksums say, and why."""
    wanted = read_checksums(folder)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name, digest in wanted.items():
        if name not in there:
            yield name, "is missing"
        elif sha256(folder / name) != digest:
            yield name, "is not what its checksum says"
    for name in sorted(there - wanted.keys() - {CHECKSUMS}):
        yield name, "has no checksum"


def _table_faults(
    folder: Path, name: str, path: Path, scale: Scale, published: Sequence[Published], broken: dict
) -> Iterator[str]:
    table, rows = TABLES.get(name, Table(None, None)), parse_rows(path)
    raw, exact = folder / RAW / path.name, path.relative_to(folder).as_posix() in broken
    if table.rows or raw.is_file():
        made = table.rows(folder, scale, published) if table.rows else parse_rows(raw)
        yield from _row_faults(f"tables/{path.name}", rows, made, exact)
        rows = made
    if table.markdown:
        text = table.markdown(rows, scale, folder)
        for suffix, expected in (("md", text), ("tex", latex_tables(text))):
            there = path.with_suffix(f".{suffix}")
            if there.is_file():
                found = there.read_text(encoding="utf-8")
                yield from _text_faults(f"tables/{there.name}", found, expected)


def _row_faults(file: str, rows: Sequence[Row], made: Sequence[Row], exact: bool) -> Iterator[str]:
    if len(rows) != len(made):
        yield f"{file}: {len(rows)} rows, where the raw rows give {len(made)}"
    for number, (row, other) in enumerate(zip(rows, made, strict=False), 2):
        for column in COLUMNS:
            found, wanted = getattr(row, column), getattr(other, column)
            if not _equal(found, wanted, exact):
                yield (
                    f"{file}, line {number} ({row.setting}, {row.metric}), column {column}: "
                    f"says {found!r}, the raw rows give {wanted!r}"
                )


def _equal(found: object, wanted: object, exact: bool) -> bool:
    if isinstance(found, float) and isinstance(wanted, int | float) and not exact:
        return math.isclose(found, wanted, rel_tol=RELATIVE, abs_tol=RELATIVE)
    return found == wanted


def _text_faults(file: str, found: str, wanted: str) -> Iterator[str]:
    """The cells of Markdown or LaTeX lines that differ, or the lines themselves."""
    lines, others = found.splitlines(), wanted.splitlines()
    if len(lines) != len(others):
        yield f"{file}: {len(lines)} lines, where the raw rows give {len(others)}"
    separator = "&" if file.endswith(".tex") else "|"
    for number, (line, other) in enumerate(zip(lines, others, strict=False), 1):
        if line == other:
            continue
        cells, expected = line.split(separator), other.split(separator)
        if len(cells) != len(expected) or len(cells) == 1:
            yield f"{file}, line {number}: says {line!r}, the raw rows give {other!r}"
            continue
        for column, (cell, want) in enumerate(zip(cells, expected, strict=True)):
            if cell != want:
                where = f"{file}, line {number}, column {column + (separator == '&')}"
                yield f"{where}: says {cell.strip()}, the raw rows give {want.strip()}"


if __name__ == "__main__":
    run_stage("fp4repro.verify", main)
