"""The Markdown that this project's tables are written in, as HTML: headings, paragraphs, lists, tables.

Not all of Markdown: what `report/*markdown.py` write, with `code`, **bold** and [links](address) in a line.
Everything else is shown as it stands, escaped.
"""

import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

LONG = 40  # characters of a cell from which on it may break
_INLINE = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|\[([^\]]+)\]\((https?://[^)\s]+)\)")


def html_text(markdown: str, level: int) -> str:
    """Its blocks; a heading `#` becomes one of this level, `##` of the next."""
    blocks = re.split(r"\n\s*\n", markdown.strip())
    return "\n".join(part for block in blocks for part in _block(block.splitlines(), level))


def _block(lines: Sequence[str], level: int) -> Iterator[str]:
    for kind, group in groupby(lines, _kind):
        found = list(group)
        if kind == "table":
            header, *body = [cells(line) for line in found]
            yield table(header, body[1:])  # the rule below the header stands between
        elif kind == "heading":
            for line in found:
                deep = level + len(line) - len(line.lstrip("#")) - 1
                yield f"<h{deep}>{inline(line.lstrip('# '))}</h{deep}>"
        elif kind in ("ul", "ol"):
            items = (inline(re.sub(r"^(-|\d+\.) +", "", line)) for line in found)
            yield f"<{kind}>{''.join(f'<li>{item}</li>' for item in items)}</{kind}>"
        else:
            yield f"<p>{inline(' '.join(found))}</p>"


def _kind(line: str) -> str:
    starts = {"|": "table", "#": "heading", "- ": "ul"}
    found = next((kind for start, kind in starts.items() if line.startswith(start)), "p")
    return "ol" if re.match(r"\d+\. ", line) else found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def inline(text: str) -> str:
    """One line with its code, bold words and links."""
    parts, end = [], 0
    for match in _INLINE.finditer(text):
        code, bold, words, address = match.groups()
        parts.append(escape(text[end : match.start()]))
        parts.append(f"<code>{escape(code)}</code>" if code else "")
        parts.append(f"<strong>{escape(bold)}</strong>" if bold else "")
        parts.append(f'<a href="{escape(address)}">{escape(words)}</a>' if words else "")
        end = match.end()
    return "".join(parts) + escape(text[end:])


def table(header: Sequence[str], body: Sequence[Sequence[str]], marked: int | None = None) -> str:
    """A table; columns with long cells may break their lines, cells of column `marked` bear their text
    as `data-verdict` for the style sheet."""
    wide = [any(len(row[i]) > LONG for row in [header, *body] if i < len(row)) for i in range(len(header))]

    def cell(tag: str, column: int, text: str) -> str:
        attributes = ' class="long"' if column < len(wide) and wide[column] else ""
        attributes += f' data-verdict="{escape(text)}"' if column == marked and tag == "td" else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{scope}{attributes}>{inline(text)}</{tag}>"

    def line(tag: str, row: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, column, text) for column, text in enumerate(row))}</tr>"

    rows = "\n".join(line("td", row) for row in body)
    head = f"<thead>{line('th', header)}</thead>"
    return f'<div class="scroll"><table>{head}\n<tbody>{rows}</tbody></table></div>'
