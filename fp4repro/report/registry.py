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
from fp4repro.report.claims import CLAIMS, claim_rows, claims_markdown
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
from fp4repro.report.schema import Row, parse_rows
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


def _studied(experiment: str) -> Callable[[Path, Scale, Sequence[Published]], list[Row]]:
    """The rows of a study that has a job, and a file, for each model."""

    def rows(folder: Path, scale: Scale, _: Sequence[Published]) -> list[Row]:
        files = [folder / experiment / f"{name.replace('/', '--')}.csv" for name in scale.fidelity.models]
        return [row for path in files for row in parse_rows(path)]

    return rows


def _claims(folder: Path, *_: object) -> list[Row]:
    """Claims are read off the folder's other tables."""
    paths = sorted((folder / "tables").glob("*.csv"))
    return claim_rows({path.stem: parse_rows(path) for path in paths if path.stem != CLAIMS})


# Studies whose table holds together the files of several jobs.
_PARTS = {name: _studied(name) for name in ("fidelity", "sensitivity")}

TABLES = {
    "pretrain": Table(_pretrain, lambda rows, scale, _: pretrain_markdown(rows, len(scale.pretrain.seeds))),
    "evals": Table(_evals, lambda rows, *_: evals_markdown(rows)),
    "evals_paired": Table(_paired, lambda rows, *_: paired_markdown(rows)),
    "ablations": Table(_ablations, _ablations_markdown),
    "fullstack": Table(_fullstack, _fullstack_markdown),
    **{
        name: Table(_PARTS.get(name), lambda rows, *_, study=study: study.markdown(rows))
        for name, study in STUDIES.items()
    },
    **{name: Table(None, lambda rows, *_, text=text: text(rows)) for name, text in MARKDOWN.items()},
    CLAIMS: Table(_claims, lambda rows, *_: claims_markdown(rows)),
}


def planned_tables(scale: Scale) -> list[str]:
    """The tables that `snakemake` makes of a scale; claims are read off them when they are published."""
    unplanned = {CLAIMS}
    if not scale.evals.models:
        unplanned |= {"evals", "evals_paired"}
    if not (scale.ablations.scratch or scale.ablations.branches):
        unplanned.add("ablations")
    if not (scale.fullstack.scratch or scale.fullstack.branches):
        unplanned.add("fullstack")
    return [name for name in TABLES if name not in unplanned]
