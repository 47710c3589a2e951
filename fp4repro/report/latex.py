"""A Markdown table as LaTeX with booktabs: what a reader sees goes into a paper as it is.

Each table of a Markdown file becomes a `tabular`, under a comment with the bold line or heading above it.
It needs `\\usepackage{booktabs}`.
"""

from collections.abc import Iterator

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


def latex_tables(markdown: str) -> str:
    """All tables of a Markdown text; empty where there is none."""
    return "\n".join(_tabular(title, lines) for title, lines in markdown_tables(markdown))


def markdown_tables(markdown: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Title and cells (the header first, without the rule below it) of each table."""
    title, table = "", []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip().strip("|").split("|")])
            continue
        if table:
            yield title, [table[0], *table[2:]]
            table = []
        if line.startswith(("#", "**")):
            title = line.strip("#* ")


def escape(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in text)


def _tabular(title: str, lines: list[list[str]]) -> str:
    header, *body = [" & ".join(map(escape, cells)) + r" \\" for cells in lines]
    columns = "l" * len(lines[0])
    parts = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([f"% {title}", *parts, r"\end{tabular}", ""])
