"""MMLU-Pro (Wang et al. 2024, arXiv 2406.01574): 12,032 questions with up to ten options.

    letters   the options are listed, the answer is one of the letters A to J, by log likelihood
    cloze     the answer is the text of an option; also normalised by its bytes, and the right one's bits
    official  five worked examples, then greedy text with "the answer is (X)": lm-eval's own definition

Small models are at chance in the first and cannot write the third; the bits that the right answer costs
move long before its rank does. `sources` says where the questions come from.
"""

import string
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import lm_eval.tasks
import yaml
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask

from fp4repro.evals.choices import ACC, GOLD_BITS, choice_task
from fp4repro.evals.sources import SPLITS, mmlu_pro_folder

NAME = "TIGER-Lab/MMLU-Pro"
LETTERS = string.ascii_uppercase[:10]
OFFICIAL = "mmlu_pro"


def letters_task(source: str) -> ConfigurableTask:
    def text(doc: dict) -> str:
        options = zip(LETTERS, doc["options"], strict=False)
        listed = "".join(f"{letter}. {option}\n" for letter, option in options)
        return f"{doc['question']}\n{listed}Answer:"

    def letters(doc: dict) -> list[str]:
        return list(LETTERS[: len(doc["options"])])

    # Letters are a byte each: to divide by it changes nothing.
    return choice_task("mmlu_pro_letters", _questions(source), text, letters, metrics=(ACC, GOLD_BITS))


def cloze_task(source: str) -> ConfigurableTask:
    return choice_task(
        "mmlu_pro_cloze",
        _questions(source),
        lambda doc: f"Question: {doc['question']}\nAnswer:",
        lambda doc: doc["options"],
    )


def official_task(source: str) -> Group:
    """lm-eval's group of fourteen tasks, as it is shipped but for where the rows come from."""
    shipped = Path(lm_eval.tasks.__file__).parent / "mmlu_pro"
    folder = mmlu_pro_folder(source)
    if folder is None:
        return _load(shipped)
    rows = {
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": {split: str(folder / f"{split}.parquet") for split in SPLITS}},
    }
    with TemporaryDirectory() as definitions:
        for path in shipped.glob("*.yaml"):
            changes = {} if path.stem == f"_{OFFICIAL}" else rows
            text = yaml.safe_dump({"include": str(path), **changes})
            (Path(definitions) / path.name).write_text(text, encoding="utf-8")
        return _load(Path(definitions))


def _load(definitions: Path) -> Group:
    manager = lm_eval.tasks.TaskManager(include_path=str(definitions), include_defaults=False)
    return manager.load([OFFICIAL])["groups"][OFFICIAL]


def _questions(source: str) -> Sequence[dict]:
    """The test split's rows: question, options and the right one's index."""
    folder = mmlu_pro_folder(source)
    if folder is None:
        import datasets

        rows = list(datasets.load_dataset(NAME, split="test"))
    else:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(folder / "test.parquet").to_pylist()
    return [
        {
            "id": str(row["question_id"]),
            "question": row["question"],
            "options": list(row["options"]),
            "answer": int(row["answer_index"]),
        }
        for row in rows
    ]
