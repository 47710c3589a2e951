"""Byte-level BPE, trained once on a corpus's training text.

Every byte has an entry, so any text can be written and none is lost: the bytes of a token are known
exactly, and loss per token turns into bits per byte without a guess. One more entry ends a text; it
cannot come out of text, even where a text spells its name, and it stands for no bytes.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write

END_OF_TEXT = "<|endoftext|>"


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


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    return _plain(Tokenizer.from_file(str(path)))


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    # Not kept in the file: a text that spells the end of a text is text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text that each entry stands for, int64 (vocabulary,); 0 for the end of a text."""
    # The byte-level alphabet spells each byte as one character.
    entries = tokenizer.get_vocab().items()
    lengths = np.zeros(len(entries), dtype=np.int64)
    for entry, number in entries:
        lengths[number] = 0 if entry == END_OF_TEXT else len(entry)
    return lengths
