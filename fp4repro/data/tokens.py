"""Token files: a scale's text as rows of little-endian integers, and what they are.

A corpus that fits into memory is `train.bin`; one of several sources is a folder of shards for each
(`shards`). Held-out text is `validation.bin` in both. `data.json` holds counts, bytes, checksums and the
settings that made the files; whoever reads them checks both, so that a run never trains on other data than
its scale says.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fp4repro.config import CorpusBytes, Scale
from fp4repro.data.corpus import load_corpus
from fp4repro.data.documents import Document
from fp4repro.data.encode import encoded
from fp4repro.data.shards import Shards
from fp4repro.data.sources import open_sources, sharded, write_sources
from fp4repro.data.tokenizer import (
    load_tokenizer,
    named_tokenizer,
    save_tokenizer,
    token_bytes,
    train_tokenizer,
)
from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write, sha256

PARTS = ("train", "validation")
# Of the sources' text that a tokenizer is trained on, from the start of each.
TOKENIZER_BYTES = 100_000_000


@dataclass(frozen=True)
class TokenData:
    """What a training run reads: memory-mapped tokens, and the bytes that each entry stands for."""

    train: np.ndarray | dict[str, Shards]  # uint16 or uint32, (tokens,), or such a row of each source
    validation: np.ndarray
    token_bytes: np.ndarray  # int64, (vocabulary,)
    checksums: dict[str, str]  # sha256 of each file, of a source of its shards together

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
        "tokenizer.name": scale.tokenizer.name,
    }


def prepare(scale: Scale, out: Path, verify: bool = False) -> dict:
    """Write tokenizer, token files and `data.json` of a scale to a folder; returns the latter.

    Shards that are there already are kept: `verify` looks at their bytes, otherwise only whether they are.
    """
    in_shards = sharded(scale.corpus)
    limit = CorpusBytes(TOKENIZER_BYTES, scale.corpus_bytes.validation) if in_shards else scale.corpus_bytes
    corpus = load_corpus(scale.corpus, limit)
    tokenizer = _tokenizer(scale, corpus.train)
    save_tokenizer(tokenizer, out / "tokenizer.json")
    dtype = np.dtype("<u2" if scale.tokenizer.vocabulary <= 2**16 else "<u4")
    summary = {
        "description": corpus.description,
        "settings": settings(scale),
        "dtype": dtype.str,
        "tokenizer_sha256": sha256(out / "tokenizer.json"),
    }
    if in_shards:
        made_of = f"{summary['tokenizer_sha256']} {json.dumps(scale.corpus, sort_keys=True)}"
        summary["train"] = write_sources(scale.corpus, out, tokenizer, dtype, made_of, verify)
    else:
        summary["train"] = _write(corpus.train, out / "train.bin", tokenizer, dtype)
    summary["validation"] = _write(corpus.validation, out / "validation.bin", tokenizer, dtype)
    _check_length(summary, scale)
    # Last of all: a folder with it holds the whole set.
    with atomic_write(out / "data.json") as temporary:
        temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _tokenizer(scale: Scale, documents: tuple[Document, ...]) -> Tokenizer:
    if scale.tokenizer.name:
        return named_tokenizer(scale.tokenizer)
    return train_tokenizer((document.text for document in documents), scale.tokenizer.vocabulary)


def _write(documents: tuple[Document, ...], path: Path, tokenizer: Tokenizer, dtype: np.dtype) -> dict:
    """One row of tokens as a file; what it holds."""
    tokens = np.concatenate([row for _, row in encoded(documents, tokenizer, dtype)])
    nbytes = sum(document.nbytes for document in documents)
    with atomic_write(path) as temporary:
        tokens.tofile(temporary)
    return {
        "documents": len(documents),
        "bytes": nbytes,
        "tokens": len(tokens),
        "bytes_per_token": nbytes / len(tokens),
        "sha256": sha256(path),
    }


def _check_length(summary: dict, scale: Scale) -> None:
    """The training text must hold a batch, of sources each a sequence, and the held-out text what the
    validation loss is a mean of."""
    training, train = scale.training, summary["train"]
    if "sources" in train:
        rows = train["sources"].items()
        wanted = [(name, row["tokens"], training.context + 1, "one sequence") for name, row in rows]
    else:
        wanted = [("train", train["tokens"], training.tokens_per_step + 1, "one batch")]
    held = summary["validation"]["tokens"], training.validation_tokens + 1, "training.validation_tokens"
    for name, tokens, least, what in [*wanted, ("validation", *held)]:
        if tokens < least:
            raise Fp4ReproError(
                f"the corpus is too short: its {name} text has {tokens} tokens, and scale "
                f"{scale.scale} needs {least} for {what}"
            )


def open_tokens(folder: Path, scale: Scale) -> TokenData:
    """The token files of a folder, checked against their checksums (shards: their sizes) and the scale."""
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
    in_shards, dtype = sharded(scale.corpus), np.dtype(summary["dtype"])
    files = ("validation",) if in_shards else PARTS
    checksums = {f"{part}.bin": summary[part]["sha256"] for part in files}
    checksums["tokenizer.json"] = summary["tokenizer_sha256"]
    for name, checksum in checksums.items():
        path = folder / name
        if not path.is_file() or sha256(path) != checksum:
            raise Fp4ReproError(f"{path} is missing or not what data.json says: {again}")
    rows = {part: np.memmap(folder / f"{part}.bin", dtype=dtype, mode="r") for part in files}
    if in_shards:
        sources = summary["train"]["sources"]
        checksums |= {f"shards/{name}": source["sha256"] for name, source in sources.items()}
        rows["train"] = open_sources(folder, sources, dtype)
    lengths = token_bytes(load_tokenizer(folder / "tokenizer.json"), scale.tokenizer.vocabulary)
    return TokenData(rows["train"], rows["validation"], lengths, checksums)
