"""The checkpoints of one unfinished run, the last `keep_checkpoints` of them, by `training.parallel`:

ddp   `checkpoint.pt`, one file that rank 0 writes (`checkpoint`); older ones as `checkpoint.pt.<step>`
fsdp  `checkpoints/step-<number>/`, to which each rank writes its shards (`sharded_checkpoint`)
"""

import os
from pathlib import Path
from typing import Any, Protocol

from fp4repro.train.checkpoint import load_checkpoint, save_checkpoint
from fp4repro.train.loop import Run


class Checkpoints(Protocol):
    """What a run does with its checkpoints; all ranks call each method."""

    def restore(self) -> list[dict]:
        """Bring the run to its last checkpoint; its sessions, none where there is no checkpoint."""

    def save(self, sessions: list[dict]) -> None:
        """Keep the run as it is now."""

    def clear(self) -> None:
        """Remove all, when the run is done."""


def checkpoints_of(out: Path, settings: dict[str, Any], run: Run) -> Checkpoints:
    """Those of `run`, whose files are in `out`; some of the other form are refused."""
    file, folder = out / "checkpoint.pt", out / "checkpoints"
    sharded = run.settings.parallel == "fsdp"
    other = file if sharded else folder
    run.world.refuse(
        f"{other} is of a run with training.parallel: {'ddp' if sharded else 'fsdp'}, which now is "
        f"{run.settings.parallel}: restore it, or delete {other.name} to start this run again"
        if other.exists()
        else ""
    )
    if not sharded:
        return OneFile(file, settings, run)
    from fp4repro.train.sharded_checkpoint import Sharded  # its imports take seconds

    return Sharded(folder, settings, run)


class OneFile:
    """Rank 0 has all that there is to save."""

    def __init__(self, path: Path, settings: dict[str, Any], run: Run) -> None:
        self.path, self.settings, self.run = path, settings, run

    def restore(self) -> list[dict]:
        state = load_checkpoint(self.path, self.settings)
        if state is None:
            return []
        self.run.restore(state)
        return state["sessions"]

    def save(self, sessions: list[dict]) -> None:
        if not self.run.world.leads:
            return
        run, keep = self.run, self.run.settings.keep_checkpoints
        if keep > 1 and self.path.exists():  # a second name, so that there is a last one at any moment
            older = self.path.with_name(f"{self.path.name}.{run.step - run.settings.checkpoint_every:010}")
            older.unlink(missing_ok=True)
            os.link(self.path, older)
        save_checkpoint(self.path, self.settings, run.state() | {"sessions": sessions})
        for older in self._older()[: -(keep - 1) or None]:
            older.unlink()

    def clear(self) -> None:
        if self.run.world.leads:
            for path in (*self._older(), self.path):
                path.unlink(missing_ok=True)

    def _older(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.name}.*"))
