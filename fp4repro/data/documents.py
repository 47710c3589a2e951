"""Documents of a corpus, which of them are held out, and how much of each is used.

A document is held out whole, never by random lines, which would leak its other half into training.
What is held out depends on names alone (by SHA-256 where a corpus has no split of its own), so that
the same text gives the same token files on every machine.
"""

import hashlib
from dataclasses import dataclass, replace

HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Document:
    name: str
    text: str

    @property
    def nbytes(self) -> int:
        """Bytes of the text in UTF-8."""
        return len(self.text.encode("utf-8"))

    def start(self, nbytes: int) -> "Document":
        """At most so many bytes from its start: whole lines, or characters of its first line."""
        head = self.text.encode("utf-8")[:nbytes]
        lines = head[: head.rfind(b"\n") + 1] or head
        return replace(self, text=lines.decode("utf-8", errors="ignore"))


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order; `description` says in words where they come from."""

    description: str
    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def held_out(name: str) -> bool:
    """Whether a document of this name is validation text; a fixed one in `HELD_OUT_ONE_IN`."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:4]) % HELD_OUT_ONE_IN == 0


def cut(documents: tuple[Document, ...], limit: int | None) -> tuple[Document, ...]:
    """The same share of every document from its start, together at most `limit` bytes.

    A small scale then sees all of a corpus's subjects.
    """
    total = sum(document.nbytes for document in documents)
    if limit is None or total <= limit:
        return documents
    return tuple(document.start(document.nbytes * limit // total) for document in documents)
