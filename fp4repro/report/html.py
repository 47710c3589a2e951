"""A published folder as one HTML page that needs nothing else: no network, no other file.

The first screen answers which claims hold, at what scale, with what interval, on what hardware; then come
the studies with their figures and tables. Data and figures are inside as `data:` addresses. The page is a
function of the folder's files alone: `page/page.html` is its template, beside its style and its script.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from fp4repro.report.claims import CLAIMS, HEADER, VERDICTS, cells, tally
from fp4repro.report.html_text import html_text, table
from fp4repro.report.registry import TABLES
from fp4repro.report.schema import Row, parse_rows
from fp4repro.report.tables import versions

PAGE = Path(__file__).parent / "page"
# Tables whose page comes under the heading of another, since one figure shows them together.
WITH = {"casts": "kernels", "roofline": "kernels", "memory": "kernels", "evals_paired": "evals"}
RULE = (
    "A verdict holds at this scale only, by the rules of fp4repro/report/claims.py and docs/ablations.md; "
    "intervals are at 95 %. Most published claims are of models a thousand times as large and more: "
    "undecided means that this scale cannot tell."
)


def html_report(folder: Path, description: str) -> str:
    """The page of a folder that has its manifest, environment, tables and figures."""
    about = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    packages = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    paths = {path.stem: path for path in sorted((folder / "tables").glob("*.csv"))}
    order = [name for name in TABLES if name in paths]
    tables = {name: parse_rows(paths[name]) for name in dict.fromkeys([*order, *paths])}
    claims = tables.pop(CLAIMS, [])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html").render(
        about=about,
        description=description,
        facts=list(_facts(about, packages, tables)),
        rule=RULE,
        summary=Markup(_summary(claims)),
        claims=Markup(table(HEADER, [cells(row) for row in claims], HEADER.index("verdict"))),
        missing=about.get("missing", []),
        studies=list(_studies(folder, tables)),
        style=Markup((PAGE / "page.css").read_text(encoding="utf-8")),
        script=Markup((PAGE / "page.js").read_text(encoding="utf-8")),
    )


def _facts(about: dict, packages: dict, tables: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, str]]:
    rows = [row for found in tables.values() for row in found if row.provenance == "measured" and row.commit]
    yield "measured on", versions(rows, "device") or "nothing measured"
    yield "machine", packages["machine"]
    yield "commit", about["commit"]
    yield "published", about["date"]
    yield "torch", versions(rows, "torch") or "unknown"
    yield "Python", packages["python"]


def _summary(claims: Sequence[Row]) -> str:
    """Verdicts by study."""
    by_study: dict[str, list[Row]] = {}
    for row in claims:
        by_study.setdefault(_title(row.setting.partition("/")[0]), []).append(row)
    lines = []
    for study, rows in by_study.items():
        counts = tally(rows)
        numbers = sorted({row.n for row in rows if row.n})
        ends = [f"{number:,}" for number in (numbers[0], numbers[-1])] if numbers else []
        lines.append([study, *(str(counts.get(word, "")) for word in VERDICTS)])
        lines[-1] += [" to ".join(dict.fromkeys(ends)), versions(rows, "scale"), versions(rows, "device")]
    return table(["study", *VERDICTS, "n (seeds, questions)", "scale", "device"], lines)


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _studies(folder: Path, tables: Mapping[str, Sequence[Row]]) -> Iterator[dict]:
    main = [name for name in tables if WITH.get(name) not in tables]
    figures = sorted((folder / "figures").glob("*.svg"))
    for name in main:
        held = [name, *(other for other in tables if WITH.get(other) == name)]
        # A figure belongs to the table with the longest name that its own begins with.
        mine = [p for p in figures if max(filter(p.stem.startswith, main), key=len, default="") == name]
        yield {
            "name": name,
            "title": _title(name),
            "files": [_inlined(folder / "tables" / f"{other}.csv", "text/csv") for other in held],
            "figures": [_inlined(path, "image/svg+xml") for path in mine],
            "text": Markup("\n".join(_text(folder / "tables" / f"{other}.md") for other in held)),
        }


def _inlined(path: Path, kind: str) -> dict:
    encoded = base64.b64encode(path.read_bytes()).decode()
    return {"name": path.name, "title": _title(path.stem), "data": f"data:{kind};base64,{encoded}"}


def _text(path: Path) -> str:
    return html_text(path.read_text(encoding="utf-8"), 3) if path.is_file() else ""
