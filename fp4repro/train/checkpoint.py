"""Checkpoints that are whole or refused, and only continue the run that they were made by.

File: one line of text, the SHA-256 of what follows, a newline, then torch's own archive. Order of
data and random bits are functions of the step, so weights, optimiser states and the step are all
that a run needs to go on bit for bit; the settings that decide its bits are kept to be compared.
"""

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write

_MAGIC = b"fp4repro checkpoint 1\n"
_HEADER = len(_MAGIC) + 2 * hashlib.sha256().digest_size + 1


def save_checkpoint(path: Path, settings: dict[str, Any], state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, texts, lists, dicts of them) of a run with `settings`."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        file.write(bytes(_HEADER))
        hashed = _Hashed(file)
        try:
            torch.save({"settings": settings, "state": state}, hashed)
        except RuntimeError as error:  # torch's own words for a write that failed
            reason = hashed.failure or error
            raise Fp4ReproError(f"{path} cannot be written ({reason}): is the disk full?") from None
        file.seek(0)
        file.write(_MAGIC + hashed.digest.hexdigest().encode() + b"\n")


def load_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The state of the run with these settings, on the CPU; None where there is no checkpoint."""
    for unfinished in path.parent.glob(f".{path.name}.*"):  # left by a process killed in writing
        unfinished.unlink(missing_ok=True)  # another rank may have been quicker
    if not path.exists():
        return None
    return state_of(path, read_checkpoint(path), settings)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A whole file's settings and state."""
    with open(path, "rb") as file:
        header = file.read(_HEADER)
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        if header != _MAGIC + checksum.encode() + b"\n":
            raise Fp4ReproError(
                f"{path} is truncated or damaged (checksum {checksum[:12]}...): delete it to start "
                "this run again"
            )
        file.seek(_HEADER)
        return torch.load(file, map_location="cpu", weights_only=True)


def state_of(path: Path, loaded: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The state that was loaded, if it is of the run with these settings."""
    for key in [*settings, *(k for k in loaded["settings"] if k not in settings)]:
        was, now = loaded["settings"].get(key), settings.get(key)
        if was != now:
            raise Fp4ReproError(
                f"{path} is of a run with other settings: {key} was {was!r} and now is {now!r}; "
                f"restore it, or delete {path.name} to start this run again"
            )
    return loaded["state"]


class _Hashed:
    """A file to write to, which digests what goes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, piece: bytes | memoryview) -> int:
        self.digest.update(piece)
        try:
            return self.file.write(piece)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self.file.flush()
