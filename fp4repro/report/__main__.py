"""python -m fp4repro.report: tables and figures from the `metrics.csv` of runs, and their check."""

import argparse
from pathlib import Path

from fp4repro.config import load_scale
from fp4repro.errors import run_stage
from fp4repro.files import atomic_write
from fp4repro.report.check import check_pretrain
from fp4repro.report.fidelity import fidelity_markdown
from fp4repro.report.formats import formats_markdown
from fp4repro.report.markdown import pretrain_markdown
from fp4repro.report.published import load_published
from fp4repro.report.runs import Runs, load_runs
from fp4repro.report.schema import parse_rows, write_rows
from fp4repro.report.sensitivity import sensitivity_markdown
from fp4repro.report.tables import EXPERIMENT, pretrain_rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.report", description=__doc__)
    commands = parser.add_subparsers(required=True)

    table = _command(commands, "pretrain", _pretrain, "write the pretraining table")
    table.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs")
    table.add_argument("--published", type=Path, default=Path("configs/published.yaml"))
    table.add_argument("--table", type=Path, required=True, help="CSV to write")
    table.add_argument("--markdown", type=Path, required=True, help="Markdown to write")

    figure = _command(commands, "figure", _figure, "draw the pretraining figure")
    figure.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs")
    figure.add_argument("--table", type=Path, required=True, help="CSV of the pretraining table")
    figure.add_argument("--png", type=Path, required=True)
    figure.add_argument("--svg", type=Path, required=True)

    formats = _command(commands, "formats", _formats, "Markdown and figure of the format study")
    formats.add_argument("--table", type=Path, required=True, help="CSV that fp4repro.fidelity wrote")
    formats.add_argument("--markdown", type=Path, required=True, help="Markdown to write")
    formats.add_argument("--png", type=Path, required=True)
    formats.add_argument("--svg", type=Path, required=True)

    for name, run, what in (
        ("fidelity", _fidelity, "gradient"),
        ("sensitivity", _sensitivity, "sensitivity"),
    ):
        study = _command(commands, name, run, f"table, Markdown and figure of the {what} study")
        study.add_argument("--rows", type=Path, nargs="+", required=True, help="a CSV a model")
        study.add_argument("--table", type=Path, required=True, help="CSV to write")
        study.add_argument("--markdown", type=Path, required=True, help="Markdown to write")
        study.add_argument("--png", type=Path, required=True)
        study.add_argument("--svg", type=Path, required=True)

    check = _command(commands, "check", _check, "is the pretraining table complete?")
    check.add_argument("table", type=Path)

    arguments = parser.parse_args()
    arguments.run(arguments)


def _command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help)
    parser.add_argument("--scale", type=Path, required=True, help="scale file of the runs")
    parser.set_defaults(run=run)
    return parser


def _runs(arguments: argparse.Namespace) -> Runs:
    scale = load_scale(arguments.scale)
    plan = scale.pretrain
    return load_runs(EXPERIMENT, scale.scale, plan.recipes, plan.seeds, arguments.runs)


def _pretrain(arguments: argparse.Namespace) -> None:
    runs = _runs(arguments)
    rows = pretrain_rows(runs, load_published(arguments.published))
    write_rows(arguments.table, rows)
    _write(arguments.markdown, pretrain_markdown(rows, len(runs.seeds)))


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _figure(arguments: argparse.Namespace) -> None:
    from fp4repro.report.figures import pretrain_figure  # seaborn takes two seconds to import

    pretrain_figure(_runs(arguments), parse_rows(arguments.table), arguments.png, arguments.svg)


def _formats(arguments: argparse.Namespace) -> None:
    from fp4repro.report.formats_figure import formats_figure

    rows = parse_rows(arguments.table)
    _write(arguments.markdown, formats_markdown(rows))
    formats_figure(rows, arguments.png, arguments.svg)


def _fidelity(arguments: argparse.Namespace) -> None:
    from fp4repro.report.fidelity_figure import fidelity_figure

    rows = [row for path in arguments.rows for row in parse_rows(path)]
    write_rows(arguments.table, rows)
    _write(arguments.markdown, fidelity_markdown(rows))
    fidelity_figure(rows, arguments.png, arguments.svg)


def _sensitivity(arguments: argparse.Namespace) -> None:
    from fp4repro.report.sensitivity_figure import sensitivity_figure

    rows = [row for path in arguments.rows for row in parse_rows(path)]
    write_rows(arguments.table, rows)
    _write(arguments.markdown, sensitivity_markdown(rows))
    sensitivity_figure(rows, arguments.png, arguments.svg)


def _check(arguments: argparse.Namespace) -> None:
    scale = load_scale(arguments.scale)
    check_pretrain(arguments.table, scale.scale, scale.pretrain.recipes, scale.pretrain.seeds)
    print(f"{arguments.table}: complete and finite, {len(scale.pretrain.recipes)} recipes")


if __name__ == "__main__":
    run_stage("fp4repro.report", main)
