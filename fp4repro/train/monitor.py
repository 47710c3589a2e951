"""What a run writes as it goes on, beside its progress: health.csv, and events for TensorBoard."""

from pathlib import Path

from fp4repro.config import Scale
from fp4repro.errors import Fp4ReproError
from fp4repro.train.health import COLUMNS, Health
from fp4repro.train.loop import CURVE, Run

EVENTS = "tensorboard"


class Monitor:
    """Follows a run as the scale's `health_every` and `tensorboard` say, from the step that it is at."""

    def __init__(self, run: Run, scale: Scale, out: Path) -> None:
        self.run = run
        self.writer = _writer(out / EVENTS, run.step) if scale.tensorboard else None
        self.health = Health(run, scale.health_every, out) if scale.health_every else None

    def after_step(self) -> None:
        rows = self.health.after_step() if self.health else []
        if self.writer is None:
            return
        step = self.run.step
        for name, value in zip(CURVE, self.run.curve[-1], strict=True):
            if name != "step" and value is not None:
                self.writer.add_scalar(f"curve/{name}", value, step)
        for _, layer, slot, *figures in rows:
            for name, value in zip(COLUMNS[3:], figures, strict=True):
                if value is not None:
                    self.writer.add_scalar(f"{slot} {name}/{layer}", value, step)

    def finish(self) -> None:
        if self.health:
            self.health.finish()
        if self.writer:
            self.writer.close()


def _writer(folder: Path, step: int) -> "SummaryWriter":  # noqa: F821 (imported where it is asked for)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Fp4ReproError(
            "the scale sets tensorboard: true, which needs the package tensorboard: "
            "pip install 'fp4repro[tensorboard]', or set tensorboard: false"
        ) from None
    # Steps after the last checkpoint are made again: their first events are taken back.
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
