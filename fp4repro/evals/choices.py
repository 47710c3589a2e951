"""A multiple-choice task for lm-eval, scored by log likelihood.

    acc                 the likeliest option is the right one
    acc_bytes           the same with each log likelihood divided by the option's bytes
    gold_bits_per_byte  bits that the right options cost, over their bytes, all questions pooled

A doc is a dict with `id`, `answer` (the right option's index) and what its texts are made of.
"""

from collections.abc import Callable, Sequence

import datasets
import numpy as np
from lm_eval.api.task import ConfigurableTask

ACC, ACC_BYTES, GOLD_BITS = "acc", "acc_bytes", "gold_bits_per_byte"
METRICS = [
    {"metric": ACC, "aggregation": "mean", "higher_is_better": True},
    {"metric": ACC_BYTES, "aggregation": "mean", "higher_is_better": True},
    {"metric": GOLD_BITS, "aggregation": "bits_per_byte", "higher_is_better": False},
]
VERSION = 1.0  # of these tasks; lm-eval's results name it


def choice_task(
    name: str,
    docs: Sequence[dict],
    text: Callable[[dict], str],
    options: Callable[[dict], list[str]],
    delimiter: str = " ",
    metrics: Sequence[str] = (ACC, ACC_BYTES, GOLD_BITS),
) -> ConfigurableTask:
    """The task over all docs, without examples; `delimiter` stands between text and option."""

    def score(doc: dict, results: Sequence[tuple[float, bool]]) -> dict:
        likelihoods = np.array([value for value, _ in results])
        nbytes = np.array([len(option.encode("utf-8")) for option in options(doc)])
        answer = doc["answer"]
        scores = {
            ACC: float(likelihoods.argmax() == answer),
            ACC_BYTES: float((likelihoods / nbytes).argmax() == answer),
            GOLD_BITS: (float(likelihoods[answer]), int(nbytes[answer])),
        }
        return {name: scores[name] for name in metrics}

    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(list(docs))},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": text,
            "doc_to_choice": options,
            "doc_to_target": "answer",
            "target_delimiter": delimiter,
            "process_results": score,
            "metric_list": [entry for entry in METRICS if entry["metric"] in metrics],
            "num_fewshot": 0,
            "metadata": {"version": VERSION},
        }
    )
