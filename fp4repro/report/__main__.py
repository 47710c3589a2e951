"""python -m fp4repro.report: tables and figures from the `metrics.csv` of runs, and their check."""

import argparse
from pathlib import Path

from fp4repro.ablations import FULLSTACK, load_ablations
from fp4repro.config import load_scale
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.files import atomic_write
from fp4repro.report.ablations import ablation_rows
from fp4repro.report.ablations_markdown import ablations_markdown
from fp4repro.report.check import check_pretrain
from fp4repro.report.evals import EVALS, PAIRED, evals_rows, paired_rows
from fp4repro.report.fullstack import fullstack_rows
from fp4repro.report.fullstack_markdown import fullstack_markdown
from fp4repro.report.gaps import Outcomes
from fp4repro.report.include import include
from fp4repro.report.kernels import MARKDOWN
from fp4repro.report.markdown import pretrain_markdown
from fp4repro.report.plan import PROTOCOLS, plans
from fp4repro.report.published import load_published
from fp4repro.report.published_accuracy import load_benchmarks, published_rows
from fp4repro.report.questions import load_evaluations
from fp4repro.report.registry import TABLES
from fp4repro.report.runs import Runs, load_runs
from fp4repro.report.schema import parse_rows, write_rows
from fp4repro.report.studies import STUDIES
from fp4repro.report.tables import EXPERIMENT, pretrain_rows
from fp4repro.report.trace import known_values, published_csvs, untraced


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

    for name in STUDIES:
        study = _command(commands, name, _study, "Markdown and figure of this study")
        study.add_argument(
            "--rows", type=Path, nargs="+", help="CSV files that the table is to hold together"
        )
        study.add_argument("--table", type=Path, required=True, help="CSV of the study")
        study.add_argument("--markdown", type=Path, required=True, help="Markdown to write")
        study.add_argument("--png", type=Path, required=True)
        study.add_argument("--svg", type=Path, required=True)
        study.set_defaults(study=STUDIES[name])

    ablations = _command(commands, "ablations", _ablations, "table and figures of the ablations")
    ablations.add_argument("--results", type=Path, required=True, help="folder results/<scale>")
    ablations.add_argument("--published", type=Path, default=Path("configs/published.yaml"))
    ablations.add_argument("--table", type=Path, required=True, help="CSV to write")
    ablations.add_argument("--markdown", type=Path, required=True, help="Markdown to write")

    forest = _command(commands, "ablations-figure", _ablations_figure, "forest plot of the ablations")
    forest.add_argument("--results", type=Path, required=True, help="folder results/<scale>")
    forest.add_argument("--protocol", choices=PROTOCOLS, required=True)
    forest.add_argument("--table", type=Path, required=True, help="CSV of the ablation table")
    forest.add_argument("--png", type=Path, required=True)
    forest.add_argument("--svg", type=Path, required=True)

    fullstack = _command(commands, "fullstack", _fullstack, "table and figure of the full stack's modules")
    fullstack.add_argument("--results", type=Path, required=True, help="folder results/<scale>")
    fullstack.add_argument("--published", type=Path, default=Path("configs/published.yaml"))
    for name in ("table", "markdown", "png", "svg"):
        fullstack.add_argument(f"--{name}", type=Path, required=True)

    kernels = _command(commands, "kernels", _kernels, "Markdown and figure of speed and memory")
    for name in ("kernels", "casts", "roofline", "memory"):
        kernels.add_argument(f"--{name}", type=Path, required=True, help="CSV; its Markdown goes beside it")
    kernels.add_argument("--png", type=Path, required=True)
    kernels.add_argument("--svg", type=Path, required=True)
    evals = _command(commands, "evals", _evals, "write the tables and the figure of evaluations")
    evals.add_argument("--evals", type=Path, nargs="*", default=[], help="folders of fp4repro.evals")
    evals.add_argument("--published", type=Path, default=Path("configs/published.yaml"))
    evals.add_argument("--tables", type=Path, required=True, help="folder for CSV and Markdown")
    evals.add_argument("--figures", type=Path, required=True, help="folder for PNG and SVG")

    check = _command(commands, "check", _check, "is the pretraining table complete?")
    check.add_argument("table", type=Path)

    tables = commands.add_parser(
        "include", help="write the tables of published folders into these texts anew"
    )
    tables.add_argument("texts", type=Path, nargs="+", help="Markdown files")
    tables.set_defaults(run=_include)

    trace = commands.add_parser("trace", help="does every figure in these texts come from somewhere?")
    trace.add_argument("texts", type=Path, nargs="+", help="Markdown files")
    trace.add_argument("--results", type=Path, default=Path("results/published"), help="published folders")
    trace.add_argument("--published", type=Path, default=Path("configs/published.yaml"))
    trace.set_defaults(run=_trace)

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


def _ablations(arguments: argparse.Namespace) -> None:
    scale, entries = load_scale(arguments.scale), load_ablations()
    rows = ablation_rows(scale, entries, load_published(arguments.published), arguments.results)
    write_rows(arguments.table, rows)
    _write(arguments.markdown, ablations_markdown(rows, entries))


def _ablations_figure(arguments: argparse.Namespace) -> None:
    from fp4repro.report.ablations_figure import ablations_figure

    scale, entries = load_scale(arguments.scale), load_ablations()
    plan = next((p for p in plans(scale, entries) if p.protocol == arguments.protocol), None)
    if plan is None:
        raise Fp4ReproError(f"scale {scale.scale} plans no ablations under the protocol {arguments.protocol}")
    outcomes = Outcomes(plan, arguments.results)
    ablations_figure(parse_rows(arguments.table), entries, outcomes, arguments.png, arguments.svg)


def _fullstack(arguments: argparse.Namespace) -> None:
    from fp4repro.report.fullstack_figure import fullstack_figure

    scale, entries = load_scale(arguments.scale), load_ablations(FULLSTACK)
    rows = fullstack_rows(scale, entries, load_published(arguments.published), arguments.results)
    write_rows(arguments.table, rows)
    _write(arguments.markdown, fullstack_markdown(rows, entries))
    fullstack_figure(rows, entries, arguments.png, arguments.svg)


def _kernels(arguments: argparse.Namespace) -> None:
    from fp4repro.report.kernels_figure import kernels_figure

    tables = {name: parse_rows(getattr(arguments, name)) for name in MARKDOWN}
    for name, rows in tables.items():
        _write(getattr(arguments, name).with_suffix(".md"), MARKDOWN[name](rows))
    kernels_figure(tables, arguments.png, arguments.svg)


def _study(arguments: argparse.Namespace) -> None:
    if arguments.rows:
        rows = [row for path in arguments.rows for row in parse_rows(path)]
        write_rows(arguments.table, rows)
    else:
        rows = parse_rows(arguments.table)
    _write(arguments.markdown, arguments.study.markdown(rows))
    arguments.study.draw(rows, arguments.png, arguments.svg)


def _evals(arguments: argparse.Namespace) -> None:
    from fp4repro.report.evals_figure import evals_figure

    got = load_evaluations(arguments.evals)
    scale = load_scale(arguments.scale)
    published = published_rows(load_published(arguments.published), load_benchmarks())
    made = {
        EVALS: evals_rows(got),
        PAIRED: [*paired_rows(got.found, got.where), *published],
    }
    for name, rows in made.items():
        write_rows(arguments.tables / f"{name}.csv", rows)
        _write(arguments.tables / f"{name}.md", TABLES[name].markdown(rows, scale, arguments.tables.parent))
    evals_figure(*made.values(), arguments.figures / "evals.png", arguments.figures / "evals.svg")


def _check(arguments: argparse.Namespace) -> None:
    scale = load_scale(arguments.scale)
    check_pretrain(arguments.table, scale.scale, scale.pretrain.recipes, scale.pretrain.seeds)
    print(f"{arguments.table}: complete and finite, {len(scale.pretrain.recipes)} recipes")


def _include(arguments: argparse.Namespace) -> None:
    for path in arguments.texts:
        text = path.read_text(encoding="utf-8")
        try:
            made = include(text, Path())
        except Fp4ReproError as error:
            raise Fp4ReproError(f"{path}: {error}") from None
        if made != text:
            _write(path, made)
        print(f"{path}: {'written anew' if made != text else 'as it was'}")


def _trace(arguments: argparse.Namespace) -> None:
    values = known_values(published_csvs(arguments.results), load_published(arguments.published))
    faults = [
        f"{path}, line {number}: {figure} is in no published table and not in {arguments.published}"
        for path in arguments.texts
        for number, figure in untraced(path.read_text(encoding="utf-8"), values)
    ]
    if faults:
        raise Fp4ReproError("\n".join(faults))
    print(f"every figure of {len(arguments.texts)} texts is traced, to {len(values)} values")


if __name__ == "__main__":
    run_stage("fp4repro.report", main)
