"""`python -m fp4repro.evals MODEL --recipes bf16 nvfp4 --tasks heldout_cloze`.

One model on tasks, in each arithmetic: a run of ours by its folder, or a pretrained model by its name or
folder. Without --tasks, --recipes and --limit the scale's `evals` entry says them.
"""

import argparse
import time
from pathlib import Path

import torch

from fp4repro.config import Scale, load_scale
from fp4repro.core.compiled import compile_nothing
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.evals.arithmetic import arithmetic
from fp4repro.evals.sources import why_missing
from fp4repro.evals.tasks import MMLU_PRO_TASKS, load_tasks, needs_hub, spelled_out, switch_hub_off
from fp4repro.pretrained import NAMED, Unavailable
from fp4repro.report.evals import evals_rows
from fp4repro.report.evals_markdown import evals_markdown
from fp4repro.report.questions import load_evaluations
from fp4repro.train import provenance


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.evals", description=__doc__.split("\n\n")[1])
    parser.add_argument("model", help="folder of a finished run; or a Hugging Face model by name or folder")
    parser.add_argument("--data", type=Path, help="the run's token files; found beside a run of the workflow")
    parser.add_argument("--scale", type=Path, default=Path("configs/scales/laptop.yaml"), help="scale file")
    parser.add_argument("--recipes", nargs="+", help="such as bf16 fp8 nvfp4 nvfp4+rht four-over-six")
    parser.add_argument("--tasks", nargs="+", help="see configs/scales; also any name of lm-eval")
    parser.add_argument("--limit", type=int, help="questions of each task at most")
    parser.add_argument("--mmlu-pro", help="folder with test.parquet, local, or hub")
    parser.add_argument(
        "--if-available",
        action="store_true",
        help="'not run' rows, not an error, for a model that cannot be had here",
    )
    parser.add_argument("--out", type=Path, help="folder for the answers; by default results/evals/MODEL")
    arguments = parser.parse_args()
    if arguments.limit is not None and arguments.limit < 1:
        raise Fp4ReproError(f"--limit is {arguments.limit}, but must be at least 1")
    out = arguments.out or Path("results/evals") / arguments.model.strip("/").replace("/", "--")
    began = time.perf_counter()
    _evaluate(arguments, load_scale(arguments.scale), out)
    print(evals_markdown(evals_rows(load_evaluations([out]))))
    print(f"{out}: {arguments.model}, {time.perf_counter() - began:.0f} s")


def _evaluate(arguments: argparse.Namespace, scale: Scale, out: Path) -> None:
    if not scale.compile:
        compile_nothing()
    run = (Path(arguments.model) / "run.json").is_file()
    asked = scale.evals.runs if run else scale.evals.pretrained
    recipes = arguments.recipes or asked.recipes
    for name in recipes:
        arithmetic(name)  # refused before any work
    source = arguments.mmlu_pro or scale.evals.mmlu_pro
    tasks, missing = _askable(spelled_out(arguments.tasks or asked.tasks), source)
    local = run or arguments.model in NAMED or Path(arguments.model).is_dir()
    if local and not needs_hub(tasks, source):
        switch_hub_off()
    _check_installed()
    from fp4repro.evals.evaluate import evaluate_model, quiet, write_not_run  # seconds, for lm-eval
    from fp4repro.evals.model import load_model, load_run

    quiet()
    device = provenance.choose_device(scale.device)
    torch.set_num_threads(scale.threads)
    limit = arguments.limit or asked.limit
    about = {
        **provenance.columns(scale.scale, device),
        "recipes": list(recipes),
        "tasks": tasks,
        "limit": limit,
        "not_run": missing,
    }
    try:
        if run:
            folder = Path(arguments.model)
            model = load_run(folder, arguments.data or folder.parents[2] / "data", scale, device)
        else:
            model = load_model(arguments.model, device)
    except Unavailable as error:
        if not arguments.if_available:
            raise
        write_not_run(arguments.model, tasks, str(error), out, about)
        return
    evaluate_model(model, recipes, load_tasks(tasks, scale, source), limit, out, about)


def _askable(names: list[str], source: str) -> tuple[list[str], dict[str, str]]:
    """The tasks whose questions are at hand, and why the others are not."""
    why = why_missing(source)
    missing = {name: why for name in names if why and name in MMLU_PRO_TASKS}
    if len(missing) == len(names):
        raise Fp4ReproError(why)
    return [name for name in names if name not in missing], missing


def _check_installed() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise Fp4ReproError(
            "evaluations need lm-eval: install the extra evals, pip install 'fp4repro[evals]'"
        ) from None


if __name__ == "__main__":
    run_stage("fp4repro.evals", main)
