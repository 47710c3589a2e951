"""A figure as PNG, SVG and PDF: the same bytes for the same results, with its fonts inside.

The PDF embeds TrueType outlines (type 42, which journals take). The SVG keeps its text as text, to be
searched and read aloud, and carries the letters that it uses as a WOFF font in its own style sheet, so
that it looks the same where DejaVu is not installed. matplotlib's dates and version stay out.
"""

import base64
import io
import re
from html import unescape
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont
from matplotlib import font_manager
from matplotlib.figure import Figure

from fp4repro.files import atomic_write

FAMILY = "DejaVu Sans"  # comes with matplotlib, so it is the same everywhere
RC = {"svg.fonttype": "none", "svg.hashsalt": "fp4repro", "pdf.fonttype": 42, "font.family": FAMILY}
_METADATA = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_BOLD = re.compile(r"font(-weight)?: (bold|700)")
_TEXT = re.compile(r"<(?:text|tspan)([^>]*)>([^<]*)")


def save(figure: Figure, png: Path, svg: Path) -> None:
    """Write both files, and the PDF beside the SVG under its name; RC is to be in force."""
    for path in (png, svg, svg.with_suffix(".pdf")):
        with atomic_write(path) as temporary:
            figure.savefig(temporary, dpi=200, metadata=_METADATA[path.suffix])
            if path.suffix == ".svg":
                text = temporary.read_text(encoding="utf-8")
                temporary.write_text(with_fonts(text), encoding="utf-8")


def with_fonts(svg: str) -> str:
    """An SVG with a font of each weight that its text uses, cut down to the letters that stand there."""
    letters: dict[str, set[str]] = {}
    for attributes, text in _TEXT.findall(svg):
        weight = "bold" if _BOLD.search(attributes) else "normal"
        letters.setdefault(weight, set()).update(unescape(text))
    faces = [_face(weight, "".join(sorted(used))) for weight, used in sorted(letters.items()) if used]
    head, defs, rest = svg.partition("<defs>")
    return f"{head}{defs}\n  <style>{''.join(faces)}</style>{rest}" if faces and defs else svg


def _face(weight: str, letters: str) -> str:
    path = font_manager.findfont(font_manager.FontProperties(family=FAMILY, weight=weight))
    options = subset.Options(flavor="woff", hinting=False, layout_features=[])
    options.drop_tables += ["FFTM"]  # the font editor's time stamps
    font = TTFont(path, recalcTimestamp=False)
    subsetter = subset.Subsetter(options)
    subsetter.populate(text=letters)
    subsetter.subset(font)
    font.flavor = "woff"
    data = io.BytesIO()
    font.save(data)
    encoded = base64.b64encode(data.getvalue()).decode()
    source = f"url(data:font/woff;base64,{encoded}) format('woff')"
    return f"@font-face{{font-family:'{FAMILY}';font-weight:{weight};src:{source}}}"
