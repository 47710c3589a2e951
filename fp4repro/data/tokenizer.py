"""Byte-level BPE, trained once on a corpus's training text, or an existing one by its name.

Every byte has an entry, so any text can be written and none is lost: the bytes of a token are known
exactly, and loss per token turns into bits per byte without a guess. One more entry ends a text; it
cannot come out of text, even where a text spells its name, and it stands for no bytes.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fp4repro.config import Tokenizer as Settings
from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # of GPT-2, Llama 3, Nemotron
_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of exactly `vocabulary` entries; a text too small for as many is refused."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise Fp4ReproError(
            f"the training text is too small for a vocabulary of {vocabulary}: it has pieces for "
            f"{tokenizer.get_vocab_size()}; lower tokenizer.vocabulary or use more text"
        )
    return _plain(tokenizer)


def named_tokenizer(settings: Settings) -> Tokenizer:
    """The tokenizer of that name: a tokenizer.json, or one of the Hugging Face hub.

    It must be byte-level, so that the bytes of a token are known, have an entry that ends a text, and fit
    into the vocabulary, whose further entries stand for nothing.
    """
    name, size = settings.name, settings.vocabulary
    try:
        tokenizer = Tokenizer.from_file(name) if Path(name).is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain exceptions, for a missing name or network too
        reason = " ".join(str(error).split())
        raise Fp4ReproError(
            f"tokenizer.name is {name!r}, which is no tokenizer.json and cannot be had from the hub: {reason}"
        ) from None
    entries = tokenizer.get_vocab_size()
    if entries > size:
        raise Fp4ReproError(f"tokenizer {name} has {entries} entries: raise tokenizer.vocabulary, now {size}")
    added = tokenizer.get_added_tokens_decoder()
    odd = [t for t, i in tokenizer.get_vocab().items() if i not in added and not _ALPHABET.issuperset(t)]
    if odd or tokenizer.normalizer is not None:
        raise Fp4ReproError(
            f"tokenizer {name} is not byte-level or changes the text, so bits per byte would be a guess: "
            "name a byte-level BPE, such as GPT-2's, Llama 3's or Nemotron's"
        )
    end_of_text(tokenizer)
    return _plain(tokenizer)


def end_of_text(tokenizer: Tokenizer) -> int:
    """The entry that ends a text."""
    found = (tokenizer.token_to_id(end) for end in _ENDS)
    end = next((number for number in found if number is not None), None)
    if end is None:
        raise Fp4ReproError(f"the tokenizer has no entry that ends a text: none of {', '.join(_ENDS)}")
    return end


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    return _plain(Tokenizer.from_file(str(path)))


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    # Not kept in the file: a text that spells the end of a text is text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def token_bytes(tokenizer: Tokenizer, vocabulary: int | None = None) -> np.ndarray:
    """Bytes of text that each entry stands for, int64 (vocabulary,); 0 for the end of a text, and for
    entries beyond the tokenizer's own."""
    lengths = np.zeros(vocabulary or tokenizer.get_vocab_size(), dtype=np.int64)
    for entry, number in tokenizer.get_vocab().items():
        lengths[number] = len(entry)  # the byte-level alphabet spells each byte as one character
    for number, added in tokenizer.get_added_tokens_decoder().items():
        lengths[number] = 0 if added.special else len(added.content.encode("utf-8"))
    return lengths
