"""Tables of published folders in the README and the docs, so that they cannot drift from their rows.

A block between two comments is a table of a published Markdown file, by its number there, all columns or
some of them by their numbers:

    <!-- table: results/published/X/tables/claims.md 1 (1 2 3) -->
    ...
    <!-- end of table -->

`python -m fp4repro.report include FILE...` writes each block anew; paths are those from the working folder.
"""

import re
from pathlib import Path

from fp4repro.errors import Fp4ReproError
from fp4repro.report.latex import markdown_tables

END = "<!-- end of table -->"
_BLOCK = re.compile(rf"<!-- table: (\S+) (\d+)(?: \(([\d ]+)\))? -->\n(.*?){re.escape(END)}", re.DOTALL)
_START = "<!-- table:"


def include(text: str, root: Path) -> str:
    """A Markdown text with its blocks made anew from the files below `root`."""

    def block(match: re.Match) -> str:
        name, number, columns, _ = match.groups()
        lines = _lines(root / name, int(number), [int(c) for c in columns.split()] if columns else None)
        head = match[0].partition("\n")[0]
        return "\n".join([head, *lines, END])

    made, count = _BLOCK.subn(block, text)
    if count != text.count(_START):
        raise Fp4ReproError(
            f"{text.count(_START) - count} of its {text.count(_START)} table comments cannot be read: write "
            f"<!-- table: FILE NUMBER (COLUMNS) --> on a line and {END} below the table"
        )
    return made


def _lines(path: Path, number: int, columns: list[int] | None) -> list[str]:
    if not path.is_file():
        raise Fp4ReproError(f"{path} does not exist: name a table of a published folder")
    tables = [cells for _, cells in markdown_tables(path.read_text(encoding="utf-8"))]
    if not 1 <= number <= len(tables):
        raise Fp4ReproError(f"{path} has {len(tables)} tables, not a number {number}")
    table = tables[number - 1]
    taken = columns or range(1, len(table[0]) + 1)
    if not all(1 <= column <= len(table[0]) for column in taken):
        raise Fp4ReproError(f"table {number} of {path} has {len(table[0])} columns: name some of these")
    header, *body = [[row[column - 1] for column in taken] for row in table]
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *body)]
