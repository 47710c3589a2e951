"""Tasks made from a scale's held-out text: there for everyone, without any download.

    heldout_cloze  ten ways to go on, one of which the text has. A question is `CONTEXT` words, its right
                   answer the `ANSWER` words after them; the nine wrong answers are right answers of
                   other questions, so that nothing but fitting the text tells them apart. Chance is 0.1.
    heldout_text   bits per byte of the text itself, in pieces of `PIECE` bytes, and its perplexity by word,
                   which like the bits compares models whose tokens differ.

Words are what white space separates, so the questions are the same for every tokenizer. Questions lie
evenly over all documents; wrong answers and places are drawn by Philox under a fixed key. The same text
gives the same questions.
"""

import re
from collections.abc import Iterator, Sequence

import datasets
import numpy as np
from lm_eval.api.task import ConfigurableTask

from fp4repro.data.documents import Document
from fp4repro.errors import Fp4ReproError
from fp4repro.evals.choices import VERSION, choice_task

CONTEXT, ANSWER = 48, 8  # words
OPTIONS = 10
QUESTIONS = 1000  # at most
PIECE = 1500  # bytes, about
PIECES = 400  # at most
_KEY = 0x636C6F7A65  # "cloze"


def cloze_questions(documents: Sequence[Document]) -> list[dict]:
    """Questions with `id`, `text`, `options` and `answer`, in the order of the text."""
    passages = [passage for document in documents for passage in _passages(document)]
    chosen = [passages[i] for i in _evenly(len(passages), QUESTIONS)]
    answers = np.array([answer for _, _, answer in chosen])
    if len(set(answers)) < OPTIONS:
        raise Fp4ReproError(
            f"the held-out text has {len(set(answers))} different passages of {CONTEXT + ANSWER} words and "
            f"the cloze task needs {OPTIONS}: raise corpus_bytes.validation"
        )
    generator = np.random.Generator(np.random.Philox(key=_KEY))
    questions = []
    for name, text, answer in chosen:
        others = np.unique(answers[answers != answer])
        options = generator.choice(others, OPTIONS - 1, replace=False).tolist()
        place = int(generator.integers(OPTIONS))
        options.insert(place, answer)
        questions.append({"id": name, "text": text, "options": options, "answer": place})
    return questions


def _passages(document: Document) -> Iterator[tuple[str, str, str]]:
    """Name, context and answer of each run of `CONTEXT` + `ANSWER` words, one after the other."""
    words = list(re.finditer(r"\S+", document.text))
    for start in range(0, len(words) - CONTEXT - ANSWER + 1, CONTEXT + ANSWER):
        first, split, last = words[start], words[start + CONTEXT], words[start + CONTEXT + ANSWER - 1]
        text = document.text[first.start() : split.start()].rstrip()
        yield f"{document.name}:{start}", text, document.text[split.start() : last.end()]


def _evenly(count: int, wanted: int) -> list[int]:
    """At most `wanted` of the indices below `count`, spread evenly over them."""
    return sorted({i * count // wanted for i in range(wanted)}) if count > wanted else list(range(count))


def cloze_task(documents: Sequence[Document]) -> ConfigurableTask:
    return choice_task(
        "heldout_cloze", cloze_questions(documents), lambda doc: doc["text"], lambda doc: doc["options"]
    )


def text_pieces(documents: Sequence[Document]) -> list[dict]:
    """Pieces of whole lines with `id` and `text`, spread evenly over the held-out text."""
    pieces = []
    for document in documents:
        lines, size, start = [], 0, 0
        for line in document.text.splitlines(keepends=True):
            lines.append(line)
            size += len(line.encode("utf-8"))
            if size >= PIECE:
                pieces.append({"id": f"{document.name}:{start}", "text": "".join(lines)})
                lines, size, start = [], 0, start + size
    if not pieces:
        raise Fp4ReproError(
            f"no held-out document has {PIECE} bytes of whole lines: raise corpus_bytes.validation"
        )
    return [pieces[i] for i in _evenly(len(pieces), PIECES)]


def text_task(documents: Sequence[Document]) -> ConfigurableTask:
    docs = text_pieces(documents)
    return ConfigurableTask(
        config={
            "task": "heldout_text",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("bits_per_byte", "word_perplexity")],
            "metadata": {"version": VERSION},
        }
    )
