"""Text at scale: several Hugging Face datasets, each read as a stream into shards of tokens.

Rows that are held out (`documents.held_out`) are left out of a source that has no validation split of its
own. `corpus.sources.<name>.bytes` bounds a source; a run that needs more tokens passes over it again.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fp4repro.data.documents import Document, held_out
from fp4repro.data.encode import encoded
from fp4repro.data.hub import rows
from fp4repro.data.shards import Index, Shards, write_shards

FOLDER = "shards"
SHARD_TOKENS = 2**27  # where the scale does not say


def sharded(corpus: str | dict) -> bool:
    """Whether a scale's corpus is one of sources."""
    return isinstance(corpus, dict) and "sources" in corpus


def write_sources(
    corpus: dict, out: Path, tokenizer: Tokenizer, dtype: np.dtype, made_of: str, verify: bool
) -> dict:
    """Make the shards of every source, or what is missing of them; what data.json says of them."""
    sources, size = {}, corpus.get("shard_tokens", SHARD_TOKENS)
    for name, entry in corpus["sources"].items():
        index = Index(out / FOLDER / name, made_of)
        index.drop_damaged(dtype.itemsize, hashed=verify)
        of_row = partial(_rows, entry, tokenizer, dtype)
        write_shards(index, of_row, size, dtype, entry.get("bytes"))
        sources[name] = {
            "documents": index.next.documents,
            "bytes": index.next.bytes,
            "tokens": index.tokens,
            "shards": [shard.tokens for shard in index.shards],
            "sha256": index.checksum,
        }
    total = {key: sum(source[key] for source in sources.values()) for key in ("documents", "bytes", "tokens")}
    return total | {"bytes_per_token": total["bytes"] / max(total["tokens"], 1), "sources": sources}


def _rows(
    entry: dict, tokenizer: Tokenizer, dtype: np.dtype, start: int
) -> Iterable[tuple[int, np.ndarray, int]]:
    """Number, tokens and bytes of each row to train on, from row `start` on."""
    stream = rows(entry, entry["split"], start)
    kept = (d for d in stream if "validation_split" in entry or not held_out(d.name))
    for document, tokens in encoded(kept, tokenizer, dtype):
        yield _number(document), tokens, document.nbytes


def _number(document: Document) -> int:
    return int(document.name.rpartition("/")[2])


def open_sources(folder: Path, sources: dict[str, dict], dtype: np.dtype) -> dict[str, Shards]:
    """The shards of each source, by what data.json says of them."""
    return {name: Shards(folder / FOLDER / name, source["shards"], dtype) for name, source in sources.items()}
