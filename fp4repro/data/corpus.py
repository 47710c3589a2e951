"""From a scale's `corpus` entry to documents: books, the standard library, files, or datasets."""

import os
from dataclasses import replace

from fp4repro.config import CorpusBytes
from fp4repro.data.documents import Corpus, cut
from fp4repro.data.files import VARIABLE, load_books, load_files
from fp4repro.data.hub import load_hub, load_sources
from fp4repro.data.stdlib import load_stdlib
from fp4repro.errors import Fp4ReproError


def load_corpus(entry: str | dict, limit: CorpusBytes) -> Corpus:
    """The corpus that an entry names, at most `limit` bytes of it; no part of it is empty."""
    corpus = _load(entry, limit)
    corpus = replace(
        corpus,
        train=cut(corpus.train, limit.train),
        validation=cut(corpus.validation, limit.validation),
    )
    for part in ("train", "validation"):
        if not any(document.text.strip() for document in getattr(corpus, part)):
            raise Fp4ReproError(
                f"the corpus is empty: {corpus.description} gives no {part} text; name texts that "
                "hold some in the scale's corpus entry, or raise corpus_bytes"
            )
    return corpus


def _load(entry: str | dict, limit: CorpusBytes) -> Corpus:
    folder = os.environ.get(VARIABLE)
    if entry == "python-stdlib" or (entry == "default" and not folder):
        return load_stdlib()
    if entry == "default":
        return load_books(folder)
    if "files" in entry:
        return load_files(entry["files"], entry["validation"])
    if "sources" in entry:
        return load_sources(entry, limit)
    return load_hub(entry["huggingface"], limit)
