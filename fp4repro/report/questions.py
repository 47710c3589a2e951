"""What each question of an evaluation gave: the raw rows that every table of evaluations is made from.

One row a model, arithmetic, task, question and metric. A task's figure comes from its metric's ratio
`sum(value) / sum(weight)`: an accuracy is the ratio itself, value 0 or 1 and weight 1; bits per byte too,
value bits and weight bytes; a word perplexity is its exponential, value nats and weight words. `chance` is
the expected value of a guess, empty where a metric has none.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write

QUESTIONS, ABOUT = "questions.csv", "evals.json"  # of one model, in its folder
COLUMNS = ("model", "recipe", "task", "question", "metric", "value", "weight", "chance")
LM_EVAL = "lm_eval"  # folder of lm-eval's own results beside them, a JSON an arithmetic
RELATIVE = 1e-9  # what two ways to add up the same floats may differ by


@dataclass(frozen=True)
class Measure:
    """What a metric is: the unit of its figure and of a difference, and how a ratio becomes a figure."""

    unit: str
    difference: str  # its unit
    factor: float = 1.0  # of a figure in tables
    of_ratio: Callable = lambda ratio: ratio  # of floats and of arrays


ACCURACY = Measure("%", "points", 100.0)
# How other metrics end.
MEASURES = {
    "bits_per_byte": Measure("bits/byte", "bits/byte"),
    "word_perplexity": Measure("1", "1", of_ratio=np.exp),
}


def measure(metric: str) -> Measure:
    return next((found for end, found in MEASURES.items() if metric.endswith(end)), ACCURACY)


@dataclass(frozen=True)
class Answers:
    """One arm's answers to a task by one metric, in the order of the questions."""

    questions: tuple[str, ...]
    values: np.ndarray  # float64, (questions,)
    weights: np.ndarray
    chances: np.ndarray | None
    measure: Measure = ACCURACY

    @property
    def figure(self) -> float:
        return float(self.measure.of_ratio(self.values.sum() / self.weights.sum()))


Arm = tuple[str, str]  # model, arithmetic
Asked = tuple[str, str]  # task, metric


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
    quantised: Mapping[Arm, tuple[int, str]] = field(default_factory=dict)  # linears, of how many and what


def load_evaluations(folders: Sequence[Path]) -> Evaluations:
    """Read `questions.csv` and `evals.json` of each folder; folders of several scales are refused, and so
    are answers that do not add up to what lm-eval's own results say."""
    abouts = [_json(folder / ABOUT) for folder in folders]
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
    quantised = {
        (about["model"], recipe): (count["linears"], f"of {count['of']} linears{_which(about)}")
        for about in abouts
        for recipe, count in about.get("quantised", {}).items()
    }
    found: dict[Arm, dict[Asked, Answers]] = {}
    for folder in folders:
        answers = read_questions([folder / QUESTIONS])
        check_agreement(folder, answers)
        found |= answers
    return Evaluations(found, missing, where, quantised)


def _which(about: Mapping) -> str:
    return f"; {about['note']}" if about.get("note") else ""


def check_agreement(folder: Path, found: Mapping[Arm, Mapping[Asked, Answers]]) -> None:
    """Raise Fp4ReproError where a figure is not the one in lm-eval's own results, if those lie beside."""
    for (model, recipe), tasks in found.items():
        path = folder / LM_EVAL / f"{recipe}.json"
        theirs = _json(path)["results"] if path.exists() else {}
        for (task, metric), answers in tasks.items() if theirs else ():
            values = [v for name, v in theirs.get(task, {}).items() if name.partition(",")[0] == metric]
            if not values or not math.isclose(values[0], answers.figure, rel_tol=RELATIVE, abs_tol=RELATIVE):
                raise Fp4ReproError(
                    f"{path}: {task}, {metric} of {model} is {values[0] if values else 'missing'}, but the "
                    f"answers in {folder / QUESTIONS} give {answers.figure}: run its evaluation again"
                )


def _json(path: Path) -> dict:
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
        measure(asked[1]),
    )
