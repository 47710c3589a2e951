"""Corpora from local text files, and the books of the folder that FP4REPRO_DATA names."""

import glob
from fnmatch import fnmatch
from pathlib import Path

from fp4repro.data.documents import Corpus, Document, held_out
from fp4repro.errors import Fp4ReproError

VARIABLE = "FP4REPRO_DATA"
BOOKS = "standard_ebooks"
# Two whole books: a novel, and natural history by an author whose other book is trained on.
HELD_OUT_BOOKS = ("*middlemarch*", "*the-voyage-of-the-beagle*")


def load_files(train: list[str], validation: list[str]) -> Corpus:
    """Files of paths and globs, one document each, without those that `validation` matches."""
    held = _matches(validation)
    kept = [path for path in _matches(train) if path not in held]
    if not kept:
        raise Fp4ReproError(
            f"the corpus is empty: all files of {', '.join(train)} are held out for validation"
        )
    return Corpus(
        f"{len(kept)} text files; held out: {', '.join(path.stem for path in held)}",
        tuple(_read(path) for path in kept),
        tuple(_read(path) for path in held),
    )


def load_books(folder: str) -> Corpus:
    """`standard_ebooks/*.txt` of a folder, without `HELD_OUT_BOOKS`, or others if none is there."""
    texts = sorted((Path(folder) / BOOKS).glob("*.txt"))
    if not texts:
        raise Fp4ReproError(
            f"{VARIABLE} names {folder!r}, where there is no {BOOKS}/*.txt: correct the variable, "
            "or unset it to train on Python's standard library"
        )
    held = [path for path in texts if any(fnmatch(path.name, book) for book in HELD_OUT_BOOKS)]
    held = held or [path for path in texts if held_out(path.name)] or texts[-1:]
    return load_files([str(path) for path in texts], [str(path) for path in held])


def _matches(patterns: list[str]) -> list[Path]:
    """The files of paths and globs, sorted by path, each once."""
    found: set[Path] = set()
    for pattern in patterns:
        plain = Path(pattern).expanduser()
        # A path with brackets in its name is a path, if there is such a file.
        paths = [plain] if plain.is_file() else map(Path, glob.glob(str(plain), recursive=True))
        here = {path.resolve() for path in paths if path.is_file()}
        if not here:
            what = "matches no file" if glob.has_magic(pattern) else "is no file"
            raise Fp4ReproError(f"the corpus entry {pattern!r} {what}, seen from {Path.cwd()}")
        found |= here
    return sorted(found)


def _read(path: Path) -> Document:
    try:
        return Document(path.name, path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Fp4ReproError(
            f"{path} is not UTF-8 text (byte {error.start} cannot be decoded): convert the file or "
            "leave it out of the corpus"
        ) from None
    except OSError as error:
        raise Fp4ReproError(f"{path} cannot be read: {error.strerror}") from None
