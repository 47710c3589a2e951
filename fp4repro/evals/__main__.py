"""`python -m fp4repro.evals (--run DIR | --model NAME) --recipes bf16 nvfp4 --tasks heldout_cloze --out DIR`.

One model, ours or Hugging Face's, on tasks, in each arithmetic. Without --tasks, --recipes and --limit the
scale's `evals` entry says them.
"""

import argparse
import os
import time
from pathlib import Path

import torch

from fp4repro.config import load_scale
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.evals.arithmetic import arithmetic
from fp4repro.evals.sources import why_missing
from fp4repro.evals.tasks import MMLU_PRO_TASKS, load_tasks, needs_hub, switch_hub_off
from fp4repro.train import provenance


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.evals", description=__doc__.split("\n\n")[1])
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--run", type=Path, help="folder of a finished run")
    model.add_argument("--model", help="Hugging Face model, by name or folder")
    parser.add_argument("--data", type=Path, help="the run's token files; found beside a run of the workflow")
    parser.add_argument("--scale", type=Path, default=Path("configs/scales/laptop.yaml"), help="scale file")
    parser.add_argument("--recipes", nargs="+", help="such as bf16 fp8 nvfp4 nvfp4+rht nvfp4+4over6")
    parser.add_argument("--tasks", nargs="+", help="see configs/scales; also any name of lm-eval")
    parser.add_argument("--limit", type=int, help="questions of each task at most")
    parser.add_argument("--mmlu-pro", help="folder with test.parquet, local, or hub")
    parser.add_argument("--out", type=Path, required=True, help="folder for the answers")
    arguments = parser.parse_args()
    if arguments.limit is not None and arguments.limit < 1:
        raise Fp4ReproError(f"--limit is {arguments.limit}, but must be at least 1")
    _evaluate(arguments)


def _evaluate(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    # Every question has its own length, and a compiled kernel would be made anew for many of them.
    os.environ.setdefault("FP4REPRO_COMPILE", "0")
    scale = load_scale(arguments.scale)
    recipes = arguments.recipes or scale.evals.recipes
    for name in recipes:
        arithmetic(name)  # refused before any work
    source = arguments.mmlu_pro or scale.evals.mmlu_pro
    tasks, missing = _askable(arguments.tasks or scale.evals.tasks, source)
    if not needs_hub(tasks, source) and (arguments.run or Path(arguments.model).is_dir()):
        switch_hub_off()
    _check_installed()
    from fp4repro.evals.evaluate import evaluate_model, quiet  # seconds, for lm-eval
    from fp4repro.evals.model import load_model, load_run

    quiet()
    device = provenance.choose_device(scale.device)
    torch.set_num_threads(scale.threads)
    if arguments.run:
        data = arguments.data or arguments.run.parents[2] / "data"
        model = load_run(arguments.run, data, scale, device)
    else:
        model = load_model(arguments.model, device)
    limit = arguments.limit or scale.evals.limit
    about = {
        "scale": scale.scale,
        "device": provenance.device_name(device),
        "torch": str(torch.__version__),
        "commit": provenance.commit(),
        "recipes": list(recipes),
        "tasks": tasks,
        "limit": limit,
        "not_run": missing,
    }
    loaded = load_tasks(tasks, scale, source)
    evaluate_model(model, recipes, loaded, limit, arguments.out, about)
    print(f"{model.name}: {', '.join(tasks)} in {', '.join(recipes)}, {time.perf_counter() - began:.0f} s")


def _askable(names: list[str], source: str) -> tuple[list[str], dict[str, str]]:
    """The tasks whose questions are at hand, and why the others are not."""
    why = why_missing(source)
    missing = {name: why for name in names if why and name in MMLU_PRO_TASKS}
    if len(missing) == len(names):
        raise Fp4ReproError(why)
    for name in missing:
        print(f"{name}: not run: {why}")
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
