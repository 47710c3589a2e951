"""What each question of an evaluation gave: the raw rows that every table of evaluations is made from.

One row a model, arithmetic, task, question and metric. A task's figure is `sum(value) / sum(weight)`: for
an accuracy value is 0 or 1 and weight 1; for bits per byte value is bits and weight bytes. `chance` is the
expected value of a guess, empty where a metric has none.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write

QUESTIONS, ABOUT = "questions.csv", "evals.json"  # of one model, in its folder
COLUMNS = ("model", "recipe", "task", "question", "metric", "value", "weight", "chance")
BITS_PER_BYTE = "bits_per_byte"  # how metrics end that are bits over bytes; the rest are accuracies


@dataclass(frozen=True)
class Answers:
    """One arm's answers to a task by one metric, in the order of the questions."""

    questions: tuple[str, ...]
    values: np.ndarray  # float64, (questions,)
    weights: np.ndarray
    chances: np.ndarray | None

    @property
    def figure(self) -> float:
        return float(self.values.sum() / self.weights.sum())


Arm = tuple[str, str]  # model, arithmetic
Asked = tuple[str, str]  # task, metric


def is_accuracy(metric: str) -> bool:
    return not metric.endswith(BITS_PER_BYTE)


def write_questions(path: Path, rows: Iterable[Sequence]) -> None:
    """Rows in the order of `COLUMNS`; floats by repr, None as an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    with atomic_write(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


def read_questions(paths: Iterable[Path]) -> dict[Arm, dict[Asked, Answers]]:
    """Answers by arm, then by task and metric, of several files."""
    lines: dict[Arm, dict[Asked, list]] = {}
    for path in paths:
        for number, line in enumerate(_lines(path), 2):
            try:
                answer = line["question"], *(float(line[k]) for k in ("value", "weight")), line["chance"]
            except (TypeError, ValueError) as error:
                raise Fp4ReproError(f"{path}, line {number}: {error}; run its evaluation again") from None
            arm, asked = (line["model"], line["recipe"]), (line["task"], line["metric"])
            lines.setdefault(arm, {}).setdefault(asked, []).append(answer)
    return {
        arm: {asked: _answers(arm, asked, rows) for asked, rows in tasks.items()}
        for arm, tasks in lines.items()
    }


@dataclass(frozen=True)
class Evaluations:
    """What the folders of an experiment's evaluations hold, in the order in which they are given."""

    found: dict[Arm, dict[Asked, Answers]]
    missing: list[tuple[Arm, str, str]]  # arm, task, why it was not run
    where: dict[str, str]  # scale, device, torch, commit


def load_evaluations(folders: Sequence[Path]) -> Evaluations:
    """Read `questions.csv` and `evals.json` of each folder; folders of several scales are refused."""
    abouts = [_about(folder / ABOUT) for folder in folders]
    scales = sorted({about["scale"] for about in abouts})
    if len(scales) > 1:
        raise Fp4ReproError(f"the evaluations are of several scales, {', '.join(scales)}: give those of one")
    missing = [
        ((about["model"], recipe), task, why)
        for about in abouts
        for recipe in about["recipes"]
        for task, why in about["not_run"].items()
    ]
    where = {
        field: " and ".join(sorted({about[field] for about in abouts}))
        for field in ("scale", "device", "torch", "commit")
    }
    return Evaluations(read_questions(folder / QUESTIONS for folder in folders), missing, where)


def _about(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Fp4ReproError(f"{path} does not exist: run its evaluation first") from None
    except json.JSONDecodeError as error:
        raise Fp4ReproError(f"{path} is damaged ({error}): run its evaluation again") from None


def _lines(path: Path) -> Iterable[dict]:
    if not path.exists():
        raise Fp4ReproError(f"{path} does not exist: run its evaluation first")
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise Fp4ReproError(f"{path} is not a file of questions: its header is not {','.join(COLUMNS)}")
        yield from reader


def _answers(arm: Arm, asked: Asked, rows: list) -> Answers:
    questions, values, weights, chances = zip(*rows, strict=True)
    if len(set(questions)) != len(questions):
        raise Fp4ReproError(f"{arm[0]} in {arm[1]}, {asked[0]}: a question stands there more than once")
    return Answers(
        questions,
        np.array(values),
        np.array(weights),
        None if "" in chances else np.array([float(chance) for chance in chances]),
    )
