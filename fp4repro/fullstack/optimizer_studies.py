"""The optimizer's studies as commands: a study is a function from a scale to figures, which become rows."""

import argparse
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fp4repro.config import Scale, load_scale
from fp4repro.report import optimizer_tables as names
from fp4repro.report.schema import Row, write_rows
from fp4repro.train import provenance

Figures = Iterable[tuple[str, str, float | None, str]]  # setting, metric, value, note


@dataclass(frozen=True)
class Study:
    """One command of `python -m fp4repro.fullstack`."""

    name: str
    figures: Callable[[Scale], Figures]

    @property
    def __doc__(self) -> str:
        return self.figures.__doc__

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--scale", type=Path, required=True, help="scale file, configs/scales/*.yaml")
        parser.add_argument("--out", type=Path, required=True, help="CSV to write")

    def run(self, arguments: argparse.Namespace) -> None:
        # Many codecs and shapes, each for little work: compiling them would take longer.
        os.environ.setdefault("FP4REPRO_COMPILE", "0")
        scale = load_scale(arguments.scale)
        torch.set_num_threads(scale.threads)
        where = provenance.columns(scale.scale, torch.device("cpu"))
        write_rows(arguments.out, rows(self.name, self.figures(scale), where))


def rows(experiment: str, figures: Figures, where: dict[str, str]) -> Iterator[Row]:
    """Results rows; `where` holds the columns that all of them share."""
    for setting, metric, value, note in figures:
        unit = names.UNITS[metric]
        if value is not None and not math.isfinite(value):
            value, note = None, f"not finite; {note}"
        yield Row(
            experiment=experiment,
            setting=setting,
            metric=metric,
            value=value,
            unit=unit,
            n=1,
            note=note,
            **where,
        )


def error_growth(scale: Scale) -> Figures:
    """Errors of chained and of long products in NVFP4."""
    from fp4repro.fullstack.error_growth import figures

    return figures(scale.fullstack_optim.matrix)


def newton_schulz(scale: Scale) -> Figures:
    """Newton-Schulz in NVFP4 by schedule and by spectrum."""
    from fp4repro.fullstack.newton_schulz_study import figures

    return figures(scale.fullstack_optim.matrix)


def optimizer_states(scale: Scale) -> Figures:
    """AdamW's states by codec: bits, errors, and training."""
    from fp4repro.fullstack.optimizer_states import figures
    from fp4repro.fullstack.tiny_lm import Setup

    plan = scale.fullstack_optim
    return figures(Setup(steps=plan.steps, width=plan.width), plan.seeds, plan.trained)


STUDIES = {f.__name__: Study(f.__name__, f) for f in (error_growth, newton_schulz, optimizer_states)}
