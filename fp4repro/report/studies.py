"""Studies whose CSV is the measurement itself: the Markdown and the figure that show each.

Drawing is imported where it is done, since seaborn takes two seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from fp4repro.report.attention_control import attention_control_markdown
from fp4repro.report.attention_tables import attention_markdown
from fp4repro.report.fidelity import fidelity_markdown
from fp4repro.report.formats import formats_markdown
from fp4repro.report.optimizer_tables import optimizer_markdown
from fp4repro.report.projection_tables import projections_markdown
from fp4repro.report.schema import Row
from fp4repro.report.sensitivity import sensitivity_markdown


@dataclass(frozen=True)
class Study:
    """`figure` names a function of (rows, png, svg) in the module of the same name."""

    markdown: Callable[[Sequence[Row]], str]
    figure: str

    def draw(self, rows: Sequence[Row], png: Path, svg: Path) -> None:
        getattr(import_module(f"fp4repro.report.{self.figure}"), self.figure)(rows, png, svg)


STUDIES = {
    "formats": Study(formats_markdown, "formats_figure"),
    "fidelity": Study(fidelity_markdown, "fidelity_figure"),
    "sensitivity": Study(sensitivity_markdown, "sensitivity_figure"),
    "projections": Study(projections_markdown, "projections_figure"),
    "attention_sensitivity": Study(attention_markdown, "attention_figure"),
    "attention_control": Study(attention_control_markdown, "attention_control_figure"),
    **dict.fromkeys(
        ("optimizer_states", "newton_schulz", "error_growth"), Study(optimizer_markdown, "optimizer_figure")
    ),
}
