"""A hook of mkdocs: links from a page to files of the repository outside docs/.

They work where the repository is browsed. In the site such a link becomes its text, and one that leads
nowhere is a warning, which `mkdocs build --strict` takes for an error.
"""

import logging
import re
from pathlib import Path

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")
ROOT = Path(__file__).parents[1]
log = logging.getLogger("mkdocs.hooks.outside_links")


def on_page_markdown(markdown: str, page, **_: object) -> str:
    def text_of(match: re.Match) -> str:
        words, target = match.groups()
        if not (ROOT / "docs" / target).exists():
            log.warning(f"{page.file.src_path}: the link to {target} leads nowhere")
        return f"{words} (`{target.removeprefix('../')}`)"

    return LINK.sub(text_of, markdown)
