"""Corpora from Hugging Face datasets: one row a document, a stream read until enough is there."""

from collections.abc import Iterable, Iterator

from fp4repro.config import CorpusBytes
from fp4repro.data.documents import Corpus, Document, held_out
from fp4repro.errors import Fp4ReproError


def load_hub(entry: dict, limit: CorpusBytes) -> Corpus:
    """The dataset that a scale's `huggingface` entry names, `limit` bytes of each part at most.

    Without a `validation_split`, rows are held out by their number; both parts then come from one
    pass over the rows.
    """
    split, held_split = entry["split"], entry.get("validation_split")
    train = _Part(limit.train)
    validation = _Part(limit.validation)
    if held_split:
        train.take(rows(entry, split))
        validation.take(rows(entry, held_split))
    else:
        for document in rows(entry, split):
            (validation if held_out(document.name) else train).add(document)
            if train.full and validation.full:
                break
    held = f"split {held_split}" if held_split else "rows by their number"
    revision = f" at {entry['revision']}" if "revision" in entry else ""
    return Corpus(
        f"dataset {entry['name']}{revision}, split {split}; held out: {held}",
        tuple(train.documents),
        tuple(validation.documents),
    )


def load_sources(entry: dict, limit: CorpusBytes) -> Corpus:
    """The first rows of each of several datasets, which share the limits evenly."""
    sources = entry["sources"]
    share = CorpusBytes(*(nbytes and nbytes // len(sources) for nbytes in (limit.train, limit.validation)))
    parts = [load_hub(source, share) for source in sources.values()]
    names = (f"{name} ({part.description})" for name, part in zip(sources, parts, strict=True))
    return Corpus(
        "; ".join(names),
        tuple(document for part in parts for document in part.train),
        tuple(document for part in parts for document in part.validation),
    )


class _Part:
    """Documents up to a number of bytes, of the last one its start."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.nbytes = 0
        self.documents: list[Document] = []

    @property
    def full(self) -> bool:
        return self.limit is not None and self.nbytes >= self.limit

    def add(self, document: Document) -> None:
        if not self.full:
            if self.limit is not None:
                document = document.start(self.limit - self.nbytes)
            self.documents.append(document)
            self.nbytes += document.nbytes

    def take(self, documents: Iterable[Document]) -> None:
        for document in documents:
            self.add(document)
            if self.full:
                return


def rows(entry: dict, split: str, start: int = 0) -> Iterator[Document]:
    """The rows of a split as a stream, from row `start` on, each named by its number."""
    name, column = entry["name"], entry["text_column"]
    try:
        from datasets import load_dataset
    except ImportError:
        raise Fp4ReproError(
            f"the corpus is the dataset {name}, which needs the package datasets: pip install 'fp4repro[hub]'"
        ) from None
    options = {k: entry[k] for k in ("data_files", "revision") if k in entry}
    try:
        stream = load_dataset(name, entry.get("config"), split=split, streaming=True, **options)
        stream = stream.skip(start) if start else stream
        first = next(iter(stream), None)
    # The hub's client raises errors of many libraries for a missing name, split or network.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise Fp4ReproError(
            f"the dataset {name}, split {split}, cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    if first is not None and not isinstance(first.get(column, 0), str | None):
        raise Fp4ReproError(
            f"the dataset {name} has no text in a column {column!r}; its columns are "
            f"{', '.join(first)}: set text_column"
        )
    for number, row in enumerate(stream, start):
        yield Document(f"{split}/{number}", row[column] or "")
