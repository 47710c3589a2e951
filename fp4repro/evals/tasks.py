"""The tasks by name: those of this project, and any other that lm-eval knows.

`configs/benchmarks.yaml` says what lm-eval calls the benchmarks of arXiv 2509.25149; the name `paper`
stands for all of them.
"""

import difflib
import os
from collections.abc import Callable, Sequence

from fp4repro.config import BENCHMARKS, Scale, read_yaml
from fp4repro.errors import Fp4ReproError
from fp4repro.evals.sources import HUB

LOCAL_TASKS = ("heldout_cloze", "heldout_text")  # made from the scale's own text
MMLU_PRO_TASKS = ("mmlu_pro_letters", "mmlu_pro_cloze", "mmlu_pro")
PAPER = "paper"
OWN = (*LOCAL_TASKS, *MMLU_PRO_TASKS)


def spelled_out(names: Sequence[str]) -> list[str]:
    """The names with the paper's tasks in place of `paper`, each once."""
    every = (task for name in names for task in (paper_tasks().values() if name == PAPER else [name]))
    return list(dict.fromkeys(every))


def needs_hub(names: Sequence[str], mmlu_pro: str) -> bool:
    """Whether any of the tasks fetches its questions."""
    return any(name not in OWN or (name in MMLU_PRO_TASKS and mmlu_pro == HUB) for name in names)


def switch_hub_off() -> None:
    """For this process; before datasets is imported, which reads it once."""
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        os.environ[variable] = "1"


def load_tasks(names: Sequence[str], scale: Scale, mmlu_pro: str) -> list:
    """lm-eval's task objects of names; an unknown name is refused with the nearest known one."""
    from fp4repro.data.corpus import load_corpus
    from fp4repro.evals import heldout  # seconds, for lm-eval
    from fp4repro.evals import mmlu_pro as pro

    if set(names) & set(LOCAL_TASKS):
        documents = load_corpus(scale.corpus, scale.corpus_bytes).validation
    make: dict[str, Callable] = {
        "heldout_cloze": lambda: heldout.cloze_task(documents),
        "heldout_text": lambda: heldout.text_task(documents),
        "mmlu_pro_letters": lambda: pro.letters_task(mmlu_pro),
        "mmlu_pro_cloze": lambda: pro.cloze_task(mmlu_pro),
        "mmlu_pro": lambda: pro.official_task(mmlu_pro),
    }
    loaded = []
    for name in names:
        try:
            loaded += [make[name]()] if name in make else _from_lm_eval(name)
        except (OSError, RuntimeError) as error:  # datasets' answers to a hub that is off or out of reach
            if not needs_hub([name], mmlu_pro):
                raise
            raise Fp4ReproError(
                f"the questions of {name} come from the Hugging Face hub, which is switched off or out of "
                f"reach ({type(error).__name__}): allow it, or name tasks that need none, such as "
                f"{', '.join(LOCAL_TASKS)}"
            ) from None
    return loaded


def _from_lm_eval(name: str) -> list:
    """A task, a group, or the tasks of a tag."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if name not in manager.all_tasks:
        near = difflib.get_close_matches(name, [*OWN, *manager.all_tasks], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise Fp4ReproError(f"there is no task {name!r}{hint}; ours are {', '.join(OWN)}")
    loaded = manager.load([name])
    return [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())


def paper_tasks() -> dict[str, str]:
    """lm-eval's name of each benchmark of the paper's accuracy table."""
    return {name: about["lm_eval"] for name, about in read_yaml(BENCHMARKS).items()}
