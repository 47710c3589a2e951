"""What 4-bit products lose in a run, tensor by tensor, every so many steps: `health.csv`.

For each quantised linear and slot of the recipe, of its first micro-batch in the step: amax, the share of
values that are zero in 4 bits (and of those that were not before), the share clipped, and of block scales
that underflow to zero or are subnormal (`core.lost` says what each means). For each linear's weight gradient
(slot `dw`, summed over micro-batches): amax and the share of exact zeros, which Nemotron 3 Super follows
(arXiv 2604.12374: 7 % at its end, three times those of BF16). The operands are those that the products get,
and nothing that is looked at changes: a run's bits are the same with and without.
"""

import csv
import io
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fp4repro.core.lost import lost
from fp4repro.core.quantize import Prepared
from fp4repro.files import atomic_write
from fp4repro.optim.shards import local
from fp4repro.train.loop import Run

COLUMNS = ("step", "name", "slot", "amax", "zero", "flushed", "clipped", "zero_scales", "subnormal_scales")
GRADIENT = "dw"
FILE, UNFINISHED = "health.csv", "health.part.csv"


class Health:
    """Measures a run every `every` steps, and writes to `out`; rows of steps done already are kept."""

    def __init__(self, run: Run, every: int, out: Path) -> None:
        self.run = run
        self.every = every
        self.path = out / UNFINISHED
        self._seen: dict[tuple[str, str], tuple] = {}
        self._keep_until(run.step)
        # At the forward pass, since a late switch of recipes gives the layers new plans as a step begins.
        run.model.register_forward_pre_hook(self._before_forward)

    def _keep_until(self, step: int) -> None:
        """Rows up to a step, in whole lines: what came after the last checkpoint will come again."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in lines[1:] if line.endswith("\n") and int(line.split(",")[0]) <= step]
        with atomic_write(self.path) as temporary:
            temporary.write_text("".join([",".join(COLUMNS) + "\n", *kept]), encoding="utf-8")

    def _before_forward(self, model: nn.Module, _: tuple) -> None:
        if model.training and (self.run.step + 1) % self.every == 0:
            for name, plan in self.run.phases.conversions[-1].plans.items():
                plan.watch = partial(self._look, name)

    def _look(self, name: str, slot: str, prepared: Prepared, x: Tensor, got: Tensor) -> None:
        if (name, slot) in self._seen:  # a later micro-batch, or the validation loss
            return
        n = lost(prepared, x, got)
        zeros = n["values"] - n["kept"] + n["flushed"]
        shares = [(zeros, n["values"]), (n["flushed"], n["kept"]), (n["clipped"], n["kept"])]
        shares += [(n[what], n["blocks"]) for what in ("zero_scales", "subnormal_scales")]
        self._seen[name, slot] = (
            float(prepared.amax),
            *(part / whole if whole else None for part, whole in shares),
        )

    def after_step(self) -> list[tuple]:
        """Rows in the order of `COLUMNS` where the step just done is one to be measured, else none."""
        step = self.run.step
        if step % self.every:
            return []
        for plan in self.run.phases.conversions[-1].plans.values():
            plan.watch = None
        rows = [(step, *key, *figures) for key, figures in self._seen.items()]
        rows += [(step, *row) for row in _gradients(self.run.model)]
        self._seen.clear()
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())
        return rows

    def finish(self) -> None:
        """The whole run is done: the file takes its name."""
        os.replace(self.path, self.path.with_name(FILE))


@torch.no_grad()
def _gradients(model: nn.Module) -> Iterator[tuple]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.grad is not None:
            # Of a matrix that ranks share, this rank's part: a collective here would wait for the others.
            gradient = local(module.weight.grad)
            if gradient.numel():
                zero = int((gradient == 0).sum()) / gradient.numel()
                yield name, GRADIENT, float(gradient.abs().amax()), zero, None, None, None, None
