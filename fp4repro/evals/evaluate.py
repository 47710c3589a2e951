"""One model on tasks, in one arithmetic after the other: the raw answers, and lm-eval's own results.

`questions.csv` has every answer (see `report.questions`), `lm_eval/<arithmetic>.json` what lm-eval made
of them, without the texts, and `evals.json`, written last, what was evaluated and what was not.
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import torch
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

import fp4repro
from fp4repro.evals.adapter import Adapter
from fp4repro.evals.arithmetic import arithmetic
from fp4repro.evals.model import EvalModel
from fp4repro.files import atomic_write
from fp4repro.report.questions import (
    ABOUT,
    ACCURACY,
    LM_EVAL,
    QUESTIONS,
    check_agreement,
    measure,
    read_questions,
    write_questions,
)


def evaluate_model(
    model: EvalModel, recipes: Sequence[str], tasks: list, limit: int | None, out: Path, about: dict
) -> None:
    """Write a model's files; `tasks` are lm-eval's objects, `about` goes to `evals.json`.

    Raises Fp4ReproError where the answers do not add up to lm-eval's own figures.
    """
    rows, swapped = [], {}
    for name in recipes:
        conversion = fp4repro.convert(model.module, arithmetic(name))
        swapped[name] = {"linears": len(conversion.swapped), "of": len(conversion.swapped | conversion.kept)}
        results = ask(Adapter(model), tasks, limit)
        samples = results.pop("samples")
        results.pop("pretty_env_info", None)  # of the machine, in pages; evals.json has what matters
        rows += [(model.name, name, *row) for row in answers(samples, metrics_of(results))]
        with atomic_write(out / LM_EVAL / f"{name}.json") as temporary:
            text = json.dumps(results, indent=2, default=handle_non_serializable)
            temporary.write_text(text + "\n", encoding="utf-8")
    write_questions(out / QUESTIONS, rows)
    check_agreement(out, read_questions([out / QUESTIONS]))
    write_about(
        out,
        {"model": model.name, "note": model.note, "context": model.context, "quantised": swapped, **about},
    )


def write_not_run(model: str, tasks: Sequence[str], why: str, out: Path, about: dict) -> None:
    """The files of a model that cannot be had: no answers, and why there are none."""
    (out / LM_EVAL).mkdir(parents=True, exist_ok=True)
    write_questions(out / QUESTIONS, [])
    write_about(
        out, {"model": model, **about, "tasks": [], "not_run": about["not_run"] | dict.fromkeys(tasks, why)}
    )


def write_about(out: Path, about: dict) -> None:
    with atomic_write(out / ABOUT) as temporary:
        temporary.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def quiet() -> None:
    """lm-eval and datasets say much that is as it should be."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def ask(lm: Adapter, tasks: list, limit: int | None) -> dict[str, Any]:
    """lm-eval's results, with samples, of at most `limit` questions of each task, spread evenly over it."""
    manager = TaskManager(include_defaults=False)
    chosen = {name: _spread(task, limit) for name, task in manager.load(list(tasks))["tasks"].items()}
    # One cache of weights in BF16 for all questions.
    with torch.autocast(lm.model.device.type, torch.bfloat16):
        return lm_eval.simple_evaluate(
            lm, tasks=list(tasks), samples=chosen, bootstrap_iters=0, task_manager=manager
        )


def _spread(task: Task, limit: int | None) -> list[int]:
    count = len(task.eval_docs)
    return [i * count // limit for i in range(limit)] if limit and limit < count else list(range(count))


def metrics_of(results: dict) -> dict[str, list[str]]:
    """The metrics that lm-eval aggregated, by task."""
    return {
        task: [name.partition(",")[0] for name in found if "," in name and "_stderr" not in name]
        for task, found in results["results"].items()
    }


def answers(samples: dict[str, list[dict]], metrics: dict[str, list[str]]) -> Iterator[tuple]:
    """Task, question, metric, value, weight and chance of every sample."""
    for task, asked in samples.items():
        for sample in asked:
            question = str(sample["doc"].get("id", sample["doc_id"]))
            for metric in dict.fromkeys(metrics[task]):
                value, kind = sample.get(metric), measure(metric)
                if kind is ACCURACY and isinstance(value, int | float):
                    yield task, question, metric, float(value), 1.0, _chance(sample)
                elif kind is not ACCURACY and isinstance(value, tuple | list):
                    nats = -float(value[0])
                    in_unit = nats / math.log(2) if metric.endswith("bits_per_byte") else nats
                    yield task, question, metric, in_unit, float(value[1]), None


def _chance(sample: dict) -> float | None:
    """One over the options: the continuations that were scored, or those that the question lists."""
    scored, listed = len(sample["arguments"]), len(sample["doc"].get("options") or ())
    options = scored if scored > 1 else listed
    return 1 / options if options else None
