"""Every table by name: how its rows come from raw files, and how a reader sees them.

`python -m fp4repro.verify` makes each table of a folder anew by its entry here, and Snakemake's stages
make it by the same functions. A further table is one more entry. `rows` takes the folder of a scale's
results (`pretrain/`, `evals/`, `tables/`), its scale and the published figures; None means that the CSV
is itself the raw measurement. `markdown` takes the rows, the scale and the folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp4repro.ablations import ABLATIONS, FULLSTACK, load_ablations
from fp4repro.config import BENCHMARKS, Scale
from fp4repro.report.ablations import ablation_rows
from fp4repro.report.ablations_markdown import ablations_markdown
from fp4repro.report.evals import evals_rows, paired_rows
from fp4repro.report.evals_markdown import evals_markdown, paired_markdown
from fp4repro.report.fullstack import fullstack_rows
from fp4repro.report.fullstack_markdown import fullstack_markdown
from fp4repro.report.kernels import MARKDOWN
from fp4repro.report.markdown import pretrain_markdown
from fp4repro.report.published import Published
from fp4repro.report.published_accuracy import load_benchmarks, published_rows
from fp4repro.report.questions import load_evaluations
from fp4repro.report.runs import load_runs
from fp4repro.report.schema import Row
from fp4repro.report.studies import STUDIES
from fp4repro.report.tables import EXPERIMENT, pretrain_rows


@dataclass(frozen=True)
class Table:
    rows: Callable[[Path, Scale, Sequence[Published]], list[Row]] | None
    markdown: Callable[[Sequence[Row], Scale, Path], str] | None


def _own(folder: Path, config: Path) -> Path:
    """A published folder brings its own configuration; a scale's results are made with the project's."""
    own = folder / "configs" / config.name
    return own if own.is_file() else config


def _pretrain(folder: Path, scale: Scale, published: Sequence[Published]) -> list[Row]:
    plan = scale.pretrain
    places = [folder / "pretrain" / recipe / f"seed-{seed}" for recipe in plan.recipes for seed in plan.seeds]
    return pretrain_rows(load_runs(EXPERIMENT, scale.scale, plan.recipes, plan.seeds, places), published)


def _ablations(folder: Path, scale: Scale, published: Sequence[Published]) -> list[Row]:
    return ablation_rows(scale, load_ablations(_own(folder, ABLATIONS)), published, folder)


def _ablations_markdown(rows: Sequence[Row], _: Scale, folder: Path) -> str:
    return ablations_markdown(rows, load_ablations(_own(folder, ABLATIONS)))


def _fullstack(folder: Path, scale: Scale, published: Sequence[Published]) -> list[Row]:
    return fullstack_rows(scale, load_ablations(_own(folder, FULLSTACK)), published, folder)


def _fullstack_markdown(rows: Sequence[Row], _: Scale, folder: Path) -> str:
    return fullstack_markdown(rows, load_ablations(_own(folder, FULLSTACK)))


def evaluation_folders(folder: Path, scale: Scale) -> list[Path]:
    return [folder / "evals" / model for model in scale.evals.models]


def _evals(folder: Path, scale: Scale, _: Sequence[Published]) -> list[Row]:
    return evals_rows(load_evaluations(evaluation_folders(folder, scale)))


def _paired(folder: Path, scale: Scale, published: Sequence[Published]) -> list[Row]:
    got = load_evaluations(evaluation_folders(folder, scale))
    benchmarks = load_benchmarks(_own(folder, BENCHMARKS))
    return [*paired_rows(got.found, got.where), *published_rows(published, benchmarks)]


TABLES = {
    "pretrain": Table(_pretrain, lambda rows, scale, _: pretrain_markdown(rows, len(scale.pretrain.seeds))),
    "evals": Table(_evals, lambda rows, *_: evals_markdown(rows)),
    "evals_paired": Table(_paired, lambda rows, *_: paired_markdown(rows)),
    "ablations": Table(_ablations, _ablations_markdown),
    "fullstack": Table(_fullstack, _fullstack_markdown),
    **{
        name: Table(None, lambda rows, *_, study=study: study.markdown(rows))
        for name, study in STUDIES.items()
    },
    **{name: Table(None, lambda rows, *_, text=text: text(rows)) for name, text in MARKDOWN.items()},
}
