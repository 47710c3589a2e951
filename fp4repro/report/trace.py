"""Does every figure in the README and the docs come from somewhere?

A figure is a number with decimals, outside code, links and versions. It is traced if a row of a published
table (any CSV of the schema in `results/published/*/` or its `tables/`: its value, an end or half of its
interval) or an entry of `configs/published.yaml` rounds to it at the digits that are printed: as it is, a
share also in per cent, a count also in thousands, millions or billions. Figures of another kind are marked:

    <!-- not a result: why -->          on the line, or on a line of its own for the paragraph or table below
    <!-- measured once: how -->         the same for an aside whose rows were not kept, with its command

A figure of two digits may find some value by accident; this is good for the longer ones, and for those it
is strict.
"""

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

from fp4repro.report.published import Published
from fp4repro.report.schema import COLUMNS, Row, parse_rows

EXEMPT = re.compile(r"<!-- (not a result|measured once): \S.* -->")
# A number is no figure inside a word, a version (1.2.3) or behind a letter or a slash.
FIGURE = re.compile(r"(?<![\w./:])[-+]?(?:\d[\d,]*)?\.\d+(?![\w.]*\.\d)(?!\w)")
_NOT_TEXT = re.compile(
    r"`[^`]*`|\]\([^)]*\)|https?://\S+|arXiv:? ?\d+\.\d+|\d+\.\d+\.\d+\S*|[Pp]ython \d+\.\d+"
)
_HEAD = ",".join(COLUMNS)
SHARES, COUNTS = ("1",), ("tokens", "parameters", "questions", "bytes")
THOUSANDS = (1, 1e-3, 1e-6, 1e-9)


def published_csvs(results: Path) -> list[Path]:
    """The tables of all published folders, and CSVs of the schema beside them."""
    beside = [path for path in results.glob("*/*.csv") if path.read_text("utf-8").startswith(_HEAD)]
    return sorted([*results.glob("*/tables/*.csv"), *beside])


def known_values(tables: Sequence[Path], published: Sequence[Published]) -> list[float]:
    """Every number that a figure may come from, in each way of printing it."""
    rows = [row for path in tables for row in parse_rows(path)]
    values = [value * f for row in rows for value in _numbers(row) for f in _factors(row.unit)]
    return values + [number for entry in published for number in (entry.value, *(entry.losses or ()))]


def _factors(unit: str) -> tuple[float, ...]:
    return (1, 100) if unit in SHARES else THOUSANDS if unit in COUNTS else (1,)


def _numbers(row: Row) -> Iterator[float]:
    if row.value is not None:
        yield row.value
    if row.ci_low is not None:
        yield from (row.ci_low, row.ci_high, (row.ci_high - row.ci_low) / 2)


def untraced(text: str, values: Sequence[float]) -> Iterator[tuple[int, str]]:
    """Line number and figure of each figure of a Markdown text that no value rounds to."""
    code = below = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        marked = EXEMPT.search(line)
        below = bool(line.strip()) and (below or bool(marked and marked[0] == line.strip()))
        if code or marked or below:
            continue
        for match in FIGURE.finditer(_NOT_TEXT.sub(" ", line)):
            if not is_traced(match[0], values):
                yield number, match[0]


def is_traced(figure: str, values: Sequence[float]) -> bool:
    """Whether a value rounds to a figure as it is printed; its sign does not count."""
    printed = Decimal(figure.lstrip("+-").replace(",", ""))
    # Half a unit of the last digit, and a little for values that lie on it.
    reach = float(Decimal(1).scaleb(printed.as_tuple().exponent)) / 2 * (1 + 1e-6)
    return any(abs(abs(value) - float(printed)) <= reach for value in values)
