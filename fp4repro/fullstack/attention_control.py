"""Does it matter in training that P in dS and O in D belong together? The tiny model says (T-D6).

Each seed trains with attention in high precision, with the Full-Stack set, and with the control whose
backward forms P from Q and K in high precision while D comes from the lowered output: rows of dS then do
not sum to zero. One step's gradient error makes the control look better. All else is in float32.
"""

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from fp4repro.config import load_scale
from fp4repro.fullstack import tiny_lm
from fp4repro.layers import convert
from fp4repro.optim import adamw
from fp4repro.recipes import AttentionRecipe, recipe
from fp4repro.report import attention_tables as names
from fp4repro.report.schema import Row, write_rows
from fp4repro.train import provenance

_STACK = AttentionRecipe(high="operands")
_LOWERED = _STACK.lowered
_CONTROL = _STACK.replace(lowered=("qk", "ds_k", "ds_q"), views=())
SETTINGS: dict[str, AttentionRecipe | None] = {
    names.HIGH: None,
    "full-stack, V in BF16": _STACK.replace(views=("q", "k")),
    "full-stack": _STACK,
    "full-stack + PV, D from its output": _STACK.replace(lowered=(*_LOWERED, "pv")),
    "full-stack + PV, D from a second output": _STACK.replace(
        lowered=(*_LOWERED, "pv"), row_term="high_output"
    ),
    "full-stack + dO V^T": _STACK.replace(lowered=(*_LOWERED, "do_v")),
    "control: P of the backward is another": _CONTROL,
    "control, D from that P too": _CONTROL.replace(row_term="p"),
}
REDUCED = (names.HIGH, "full-stack", "control: P of the backward is another")


def trained(setting: str, setup: tiny_lm.Setup, seed: int) -> float | None:
    """Validation loss, nats a byte; None where it diverged."""
    attention = SETTINGS[setting]

    def make(model: nn.Module):
        convert(model, recipe("bf16").replace(attention=attention), seed)
        rest = {
            k: v for k, v in asdict(setup).items() if k in ("learning_rate", "betas", "eps", "weight_decay")
        }
        return adamw(model, **rest)

    return tiny_lm.run(setup, make, seed).validation


def figures(
    setup: tiny_lm.Setup, seeds: Sequence[int], settings: Sequence[str] = tuple(SETTINGS)
) -> Iterable[tuple[str, str, float | None, str]]:
    """(setting/seed-n, metric, value, note), the gap to high precision of the same seed after each loss."""
    sizes = f"{setup.steps} steps, width {setup.width}"
    for seed in seeds:
        base = None
        for setting in settings:
            loss = trained(setting, setup, seed)
            base = loss if setting == names.HIGH else base
            note = sizes if loss is not None else f"diverged; {sizes}"
            yield f"{setting}/seed-{seed}", names.LOSS, loss, note
            if setting != names.HIGH and base is not None:
                gap = None if loss is None else loss - base
                yield f"{setting}/seed-{seed}", names.LOSS_GAP, gap, note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=Path, required=True, help="scale file, configs/scales/*.yaml")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")


def run(arguments: argparse.Namespace) -> None:
    """Train as the scale's section attention_control says and write the rows, one seed a row."""
    os.environ.setdefault("FP4REPRO_COMPILE", "0")
    scale = load_scale(arguments.scale)
    torch.set_num_threads(scale.threads)
    where = provenance.columns(scale.scale, torch.device("cpu"))
    plan = scale.attention_control
    settings = REDUCED if plan.reduced else tuple(SETTINGS)
    setup = tiny_lm.Setup(steps=plan.steps, width=plan.width)
    common = {"experiment": names.CONTROL, "unit": "nats/byte", "n": 1, **where}
    write_rows(
        arguments.out,
        (
            Row(setting=setting, metric=metric, value=value, note=note, **common)
            for setting, metric, value, note in figures(setup, plan.seeds, settings)
        ),
    )
