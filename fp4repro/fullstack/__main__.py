"""`python -m fp4repro.fullstack STUDY --scale FILE --out FILE`: the rest of the stack in 4 bits."""

import argparse
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from fp4repro.config import Scale, load_scale
from fp4repro.errors import run_stage
from fp4repro.report import optimizer_tables as names
from fp4repro.report.schema import Row, write_rows
from fp4repro.train import provenance

Figures = Iterable[tuple[str, str, float | None, str]]


def error_growth(scale: Scale) -> Figures:
    from fp4repro.fullstack.error_growth import figures

    return figures(scale.fullstack_optim.matrix)


def newton_schulz(scale: Scale) -> Figures:
    from fp4repro.fullstack.newton_schulz_study import figures

    return figures(scale.fullstack_optim.matrix)


def optimizer_states(scale: Scale) -> Figures:
    from fp4repro.fullstack.optimizer_states import figures
    from fp4repro.fullstack.tiny_lm import Setup

    plan = scale.fullstack_optim
    return figures(Setup(steps=plan.steps, width=plan.width), plan.seeds, plan.trained)


# A study is a function from a scale to figures: setting, metric, value, note.
STUDIES: dict[str, Callable[[Scale], Figures]] = {
    "error_growth": error_growth,
    "newton_schulz": newton_schulz,
    "optimizer_states": optimizer_states,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.fullstack", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, study in STUDIES.items():
        command = commands.add_parser(name)
        command.add_argument("--scale", type=Path, required=True, help="scale file, configs/scales/*.yaml")
        command.add_argument("--out", type=Path, required=True, help="CSV to write")
        command.set_defaults(name=name, study=study)
    arguments = parser.parse_args()
    # Many codecs and shapes, each for little work: compiling them would take longer.
    os.environ.setdefault("FP4REPRO_COMPILE", "0")
    scale = load_scale(arguments.scale)
    torch.set_num_threads(scale.threads)
    where = {
        "scale": scale.scale,
        "device": provenance.device_name(torch.device("cpu")),
        "torch": str(torch.__version__),
        "commit": provenance.commit(),
    }
    write_rows(arguments.out, rows(arguments.name, arguments.study(scale), where))


def rows(experiment: str, figures: Figures, where: dict[str, str]) -> Iterable[Row]:
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


if __name__ == "__main__":
    run_stage("fp4repro.fullstack", main)
