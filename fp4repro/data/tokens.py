"""Token files: each part of a corpus as one row of little-endian integers, and what they are.

`data.json` holds counts, bytes, checksums and the settings that made the files; whoever reads them
checks both, so that a run never trains on other data than its scale says.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fp4repro.config import Scale
from fp4repro.data.corpus import load_corpus
from fp4repro.data.documents import Document
from fp4repro.data.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    save_tokenizer,
    token_bytes,
    train_tokenizer,
)
from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write, sha256

PARTS = ("train", "validation")
_AT_ONCE = 64


@dataclass(frozen=True)
class TokenData:
    """What a training run reads: memory-mapped tokens, and the bytes that each entry stands for."""

    train: np.ndarray  # uint16 or uint32, (tokens,)
    validation: np.ndarray
    token_bytes: np.ndarray  # int64, (vocabulary,)
    checksums: dict[str, str]  # sha256 of each file

    @property
    def vocabulary(self) -> int:
        return len(self.token_bytes)


def settings(scale: Scale) -> dict:
    """All that the token files depend on besides the text itself."""
    return {
        "corpus": scale.corpus,
        "corpus_bytes.train": scale.corpus_bytes.train,
        "corpus_bytes.validation": scale.corpus_bytes.validation,
        "tokenizer.vocabulary": scale.tokenizer.vocabulary,
    }


def prepare(scale: Scale, out: Path) -> dict:
    """Write tokenizer, token files and `data.json` of a scale to a folder; returns the latter."""
    corpus = load_corpus(scale.corpus, scale.corpus_bytes)
    tokenizer = train_tokenizer((d.text for d in corpus.train), scale.tokenizer.vocabulary)
    save_tokenizer(tokenizer, out / "tokenizer.json")
    lengths = token_bytes(tokenizer)
    dtype = np.dtype("<u2" if scale.tokenizer.vocabulary <= 2**16 else "<u4")
    summary = {
        "description": corpus.description,
        "settings": settings(scale),
        "dtype": dtype.str,
        "tokenizer_sha256": sha256(out / "tokenizer.json"),
    }
    least = {
        "train": scale.training.tokens_per_step + 1,
        "validation": scale.training.validation_tokens + 1,
    }
    for part in PARTS:
        documents = getattr(corpus, part)
        tokens = encode(documents, tokenizer, dtype)
        nbytes = sum(document.nbytes for document in documents)
        if lengths[tokens].sum() != nbytes:
            raise AssertionError(f"{part}: the tokens do not stand for the {nbytes} bytes of text")
        if len(tokens) < least[part]:
            raise Fp4ReproError(
                f"the corpus is too short: its {part} text has {len(tokens)} tokens, and scale "
                f"{scale.scale} needs {least[part]} for "
                + ("one batch" if part == "train" else "training.validation_tokens")
            )
        with atomic_write(out / f"{part}.bin") as temporary:
            tokens.tofile(temporary)
        summary[part] = {
            "documents": len(documents),
            "bytes": nbytes,
            "tokens": len(tokens),
            "bytes_per_token": nbytes / len(tokens),
            "sha256": sha256(out / f"{part}.bin"),
        }
    # Last of all: a folder with it holds the whole set.
    with atomic_write(out / "data.json") as temporary:
        temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def encode(documents: tuple[Document, ...], tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    """The tokens of documents in their order, an end of text after each; (tokens,)."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = []
    # A few at a time: what the library returns takes many times the room of the tokens.
    for start in range(0, len(documents), _AT_ONCE):
        texts = [document.text for document in documents[start : start + _AT_ONCE]]
        pieces += [np.array([*e.ids, end], dtype) for e in tokenizer.encode_batch_fast(texts)]
    return np.concatenate(pieces)


def open_tokens(folder: Path, scale: Scale) -> TokenData:
    """The token files of a folder, checked against their checksums and against the scale."""
    again = f"run python -m fp4repro.data with scale {scale.scale} and --out {folder}"
    try:
        summary = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Fp4ReproError(f"{folder} has no data.json, so no token files: {again}") from None
    except json.JSONDecodeError as error:
        raise Fp4ReproError(f"{folder / 'data.json'} is damaged ({error}): {again}") from None
    for name, value in settings(scale).items():
        if summary["settings"].get(name) != value:
            was = summary["settings"].get(name)
            raise Fp4ReproError(
                f"{folder} holds token files of other settings: {name} is {value!r} in scale "
                f"{scale.scale} and was {was!r} when they were made; {again}"
            )
    checksums = {f"{part}.bin": summary[part]["sha256"] for part in PARTS}
    checksums["tokenizer.json"] = summary["tokenizer_sha256"]
    for name, checksum in checksums.items():
        path = folder / name
        if not path.is_file() or sha256(path) != checksum:
            raise Fp4ReproError(f"{path} is missing or not what data.json says: {again}")
    train, validation = (
        np.memmap(folder / f"{part}.bin", dtype=summary["dtype"], mode="r") for part in PARTS
    )
    return TokenData(train, validation, token_bytes(load_tokenizer(folder / "tokenizer.json")), checksums)
