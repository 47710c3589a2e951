"""A long row of tokens in files of one size, which are made once and can be gone on with in the middle.

`shards.jsonl` has a line a finished shard: what it holds (SHA-256, tokens), and where the next one begins: a
row of the dataset, and how many of its tokens are written already. A shard is there once its line is, and
its line is written when its bytes are on disk, so a killed process leaves no partial one, and the next one
goes on from the last line. The last line, `end`, says that the rows were all read.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write, sha256

INDEX = "shards.jsonl"
_OPEN = 1024  # files mapped at once

# (row's number, its tokens, its bytes of text), from a row on
Rows = Callable[[int], Iterable[tuple[int, np.ndarray, int]]]


@dataclass(frozen=True)
class Cursor:
    """Where the next shard begins, and what the rows before that row came to."""

    row: int = 0
    written: int = 0  # tokens of that row that are in shards already
    documents: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Shard:
    tokens: int
    sha256: str
    next: Cursor


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.bin"


class Index:
    """`shards.jsonl` of a folder; `made_of` tells what the tokens depend on, which a resume must share."""

    def __init__(self, folder: Path, made_of: str) -> None:
        self.folder = folder
        self.path = folder / INDEX
        self.made_of = made_of
        self.shards: list[Shard] = []
        self.complete = False
        for line in self._lines():
            if line == {"end": True}:
                self.complete = True
            else:
                self.shards.append(Shard(line["tokens"], line["sha256"], Cursor(**line["next"])))

    def _lines(self) -> list[dict]:
        """Whole lines of an index of the same text and tokenizer; other ones are taken away."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        head, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]  # without a line cut short
        if head != json.dumps({"made_of": self.made_of}):
            for stale in (self.path, *self.folder.glob("*.bin")):
                stale.unlink()
            return []
        found = [json.loads(line) for line in lines]
        if not text.endswith("\n"):
            self._rewrite(found)
        return found

    def _rewrite(self, lines: list[dict]) -> None:
        with atomic_write(self.path) as temporary:
            text = "".join(json.dumps(line) + "\n" for line in ({"made_of": self.made_of}, *lines))
            temporary.write_text(text, encoding="utf-8")

    def drop_damaged(self, itemsize: int, hashed: bool) -> None:
        """Forget the first shard that is not on disk as the index says, and those after it, so that they
        are made anew; `hashed`: by its bytes, not by its size alone. `itemsize`: bytes of a token."""
        for number, shard in enumerate(self.shards):
            path = shard_path(self.folder, number)
            whole = path.is_file() and path.stat().st_size == shard.tokens * itemsize
            if not whole or (hashed and sha256(path) != shard.sha256):
                self.shards, self.complete = self.shards[:number], False
                self._rewrite([asdict(each) for each in self.shards])
                return

    def add(self, shard: Shard) -> None:
        self._append(asdict(shard))
        self.shards.append(shard)

    def close(self) -> None:
        self._append({"end": True})
        self.complete = True

    def _append(self, line: dict) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        first = [] if self.path.exists() else [{"made_of": self.made_of}]
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in (*first, line))
            file.flush()
            os.fsync(file.fileno())

    @property
    def next(self) -> Cursor:
        return self.shards[-1].next if self.shards else Cursor()

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def checksum(self) -> str:
        """Of all shards together."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()


def write_shards(index: Index, rows: Rows, size: int, dtype: np.dtype, limit: int | None) -> None:
    """Write the tokens of `rows` as shards of `size` tokens, from where the index ends.

    `limit`: bytes of text at most, whole rows.
    """
    if index.complete:
        return
    at = index.next
    buffer, filled = np.empty(size, dtype), 0

    def flush() -> None:
        path = shard_path(index.folder, len(index.shards))
        with atomic_write(path) as temporary:
            buffer[:filled].tofile(temporary)
        index.add(Shard(filled, sha256(path), at))

    for row, tokens, nbytes in rows(at.row):
        if limit is not None and at.bytes + nbytes > limit:
            break
        start = at.written if row == at.row else 0
        while start < len(tokens):
            taken = min(size - filled, len(tokens) - start)
            buffer[filled : filled + taken] = tokens[start : start + taken]
            start, filled = start + taken, filled + taken
            if filled == size and start < len(tokens):
                at = replace(at, row=row, written=start)
                flush()
                filled = 0
        at = Cursor(row + 1, 0, at.documents + 1, at.bytes + nbytes)
        if filled == size:
            flush()
            filled = 0
    if filled:
        flush()
    index.close()


class Shards:
    """The tokens of all shards as one row, memory-mapped."""

    def __init__(self, folder: Path, lengths: list[int], dtype: np.dtype) -> None:
        self.folder = folder
        self.size = lengths[0]  # of every shard but the last
        self.length = sum(lengths)
        for number, tokens in enumerate(lengths):
            path, wanted = shard_path(folder, number), tokens * dtype.itemsize
            if not path.is_file() or path.stat().st_size != wanted:
                raise Fp4ReproError(
                    f"{path} is missing or has not the {wanted} bytes that data.json says: run "
                    f"python -m fp4repro.data again, which makes what is missing"
                )
        self._map = lru_cache(maxsize=_OPEN)(
            lambda number: np.memmap(shard_path(folder, number), dtype=dtype, mode="r")
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, where: slice) -> np.ndarray:
        """The tokens of a slice (start, stop), which may lie in several shards."""
        pieces, start = [], where.start
        while start < where.stop:
            number, place = divmod(start, self.size)
            piece = self._map(number)[place : place + where.stop - start]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces)
