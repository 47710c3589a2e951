"""Checkpoints of sharded runs: torch.distributed.checkpoint's, read on any number of ranks, whole or refused.

A folder a checkpoint, to which each rank writes its shards of weights and optimizer states. `manifest.pt`, in
the form of `checkpoint`, has the settings, what is not sharded, and the SHA-256 of every other file. A folder
is filled under a hidden name and then renamed, so one that can be seen is whole.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fp4repro.errors import Fp4ReproError
from fp4repro.files import sha256
from fp4repro.layers import carried_state, restore_carried_state
from fp4repro.optim import NVFP4AdamW
from fp4repro.optim.sharded_state import sharded_state, take_numbers
from fp4repro.train.checkpoint import read_checkpoint, save_checkpoint, state_of
from fp4repro.train.loop import Run

MANIFEST = "manifest.pt"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # states by the parameter's name


class Sharded:
    """Every rank writes and reads its shards; a rank alone, all of them."""

    def __init__(self, root: Path, settings: dict[str, Any], run: Run) -> None:
        self.root, self.settings, self.run, self.world = root, settings, run, run.world

    def restore(self) -> list[dict]:
        if self.world.leads:
            for left in self.root.glob(".*"):  # by ranks killed in writing or removing
                shutil.rmtree(left)
        self._wait()
        folders = self._folders()
        if not folders:
            return []
        folder, run = folders[-1], self.run
        manifest, problem = folder / MANIFEST, ""
        try:
            problem = self._damage(folder)
            kept = {} if problem else state_of(self.root, read_checkpoint(manifest), self.settings)
        except Fp4ReproError as error:
            problem = str(error)
        self.world.refuse(problem)
        state = self._sharded()
        dcp.load(state, checkpoint_id=folder, no_dist=self.world.size == 1)
        if isinstance(run.optimizer, NVFP4AdamW):
            set_model_state_dict(run.model, state["model"])
            take_numbers(run.optimizer, state["optimizer"])
        else:
            set_state_dict(
                run.model,
                run.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=_FLAT,
            )
        restore_carried_state(run.model, kept["layers"])
        run.curve = kept["curve"]
        return kept["sessions"]

    def save(self, sessions: list[dict]) -> None:
        run, world = self.run, self.world
        folder = self.root / f"step-{run.step:010}"
        draft = folder.with_name(f".{folder.name}")
        if world.leads:
            draft.mkdir(parents=True)
        self._wait()
        try:
            dcp.save(self._sharded(), checkpoint_id=draft, no_dist=world.size == 1)
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise Fp4ReproError(f"{folder} cannot be written ({reason}): is the disk full?") from None
        mine = [*draft.glob(f"__{world.rank}_*"), *(draft.glob(".metadata") if world.leads else ())]
        files = [f for files in world.everyones([(p.name, sha256(p)) for p in mine]) for f in files]
        if world.leads:
            about = {"curve": run.curve, "layers": carried_state(run.model), "sessions": sessions}
            save_checkpoint(draft / MANIFEST, self.settings, about | {"files": dict(files)})
            _sync(draft)
            os.replace(draft, folder)
            _sync(self.root)
            for old in self._folders()[: -run.settings.keep_checkpoints]:
                _remove(old)
        self._wait()  # nobody runs ahead of a checkpoint that may still fail

    def clear(self) -> None:
        if self.world.leads:
            for folder in self._folders():
                _remove(folder)
            with suppress(OSError):  # not there, or with something of the user's in it
                self.root.rmdir()

    def _sharded(self) -> dict[str, Any]:
        run = self.run
        if isinstance(run.optimizer, NVFP4AdamW):  # torch's function knows no state that is a dictionary
            return {"model": get_model_state_dict(run.model), "optimizer": sharded_state(run.optimizer)}
        model, optimizer = get_state_dict(run.model, run.optimizer, options=_FLAT)
        return {"model": model, "optimizer": optimizer}

    def _damage(self, folder: Path) -> str:
        """What is wrong with a folder, as a sentence; each rank looks at its share of the files."""
        manifest = folder / MANIFEST
        wrong = MANIFEST if not manifest.is_file() else ""
        try:
            files = {} if wrong else read_checkpoint(manifest)["state"]["files"]
        except Fp4ReproError:
            wrong, files = MANIFEST, {}
        for name in sorted(files)[self.world.rank :: self.world.size]:
            path = folder / name
            if not path.is_file() or sha256(path) != files[name]:
                wrong = wrong or name
        return wrong and (
            f"{folder} is truncated or damaged ({wrong} is not what was written): delete this folder to go "
            "on from the one before it, or from the start where there is none"
        )

    def _folders(self) -> list[Path]:
        return sorted(self.root.glob("step-*"))

    def _wait(self) -> None:
        self.world.everyones(None)


def _remove(folder: Path) -> None:
    """First out of sight, since removing takes many steps."""
    hidden = folder.with_name(f".{folder.name}")
    os.replace(folder, hidden)
    shutil.rmtree(hidden)


def _sync(folder: Path) -> None:
    """Force a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
