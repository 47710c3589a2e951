"""Any causal language model of the Hugging Face hub or of a folder, and its tokenizer, in FP32.

A name is a folder, a model of the hub, or one of `NAMED`, which come without the hub: SmolLM2-135M
from a Python package (`smollm2`). transformers does the reading and is imported here alone. A model
that this machine cannot get raises `Unavailable`, which a pipeline turns into "not run" rows; a file
that is damaged or no such model is a plain error.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fp4repro.errors import Fp4ReproError
from fp4repro.pretrained import smollm2
from fp4repro.pretrained.unavailable import Unavailable

# Name -> () -> (folder that transformers reads, what is to be said of the model).
NAMED: dict[str, Callable[[], tuple[Path, str]]] = {smollm2.NAME: smollm2.fetch}


@dataclass(frozen=True)
class Pretrained:
    """A causal language model as transformers gives it, in evaluation mode, and its tokenizer."""

    name: str
    model: nn.Module
    tokenizer: object  # a transformers tokenizer
    note: str  # which model it is, and whether its weights were quantised before

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text without special ones at its ends; int64 (tokens,)."""
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)

    def logits(self, tokens: Tensor) -> Tensor:
        """(sequences, length) -> (sequences, length, vocabulary)."""
        return self.model(input_ids=tokens, use_cache=False).logits


def load_pretrained(name: str) -> Pretrained:
    """The model of that name or path, its parameters in FP32.

    Raises `Unavailable` where a package, the network or the model is missing, Fp4ReproError for a model
    that cannot be read.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Unavailable(
            "pretrained models need transformers, which is not installed: pip install 'fp4repro[real]'"
        )
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    place, note = NAMED[name]() if name in NAMED else (Path(name), f"the model {name}")
    source = str(place) if place.is_dir() else name
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except OSError as error:  # transformers' answer to a name that it cannot find, offline or not
        raise Unavailable(
            f"{name} could not be loaded from a folder or the Hugging Face hub ({_first_line(error)}) "
            f"Check the name and the network, or name one of {', '.join(NAMED)}"
        ) from None
    except (ValueError, KeyError, ImportError) as error:
        raise Fp4ReproError(
            f"{name} cannot be read as a causal language model: {_first_line(error)}"
        ) from None
    return Pretrained(name, model.eval(), tokenizer, note)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
