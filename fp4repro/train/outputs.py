"""The files of a finished run: metrics, curve, layers, weights, and what made them.

`metrics.csv` comes last: where it is, the others are. A branch's curve has its own steps, without
the trunk's. Metrics and curve hold nothing that differs between two runs of the same settings; times
are in `run.json`.
"""

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from fp4repro.files import atomic_write
from fp4repro.layers import Conversion
from fp4repro.report import schema
from fp4repro.train.evaluate import HeldOut, microbatches
from fp4repro.train.held import optimizer_bytes, saved_bytes
from fp4repro.train.job import Job
from fp4repro.train.loop import CURVE, Run
from fp4repro.train.protocols import KEEP_WEIGHTS
from fp4repro.train.provenance import device_name

LAYERS = ("name", "precision", "in", "out", "reason")
TRAIN_LOSS = "train_loss"
LINEARS_QUANTISED = "linears_quantised"
SHARE_QUANTISED = "share_of_linear_flops_quantised"
UNITS = schema.UNITS | {TRAIN_LOSS: "nats/token", LINEARS_QUANTISED: "linears", SHARE_QUANTISED: "1"}
_TRAIN_LOSS_SHARE = 0.1  # of the steps, at the end


def write_outputs(
    out: Path, job: Job, run: Run, conversion: Conversion, held: HeldOut, sessions: list[dict]
) -> None:
    """Write all files of a run; `sessions` tells which processes trained it, and when.

    All ranks call it, since the last figures take all of them; the first one writes.
    """
    where = {
        "experiment": job.protocol,
        "setting": job.label,
        "scale": job.scale.scale,
        "device": device_name(job.device),
        "torch": str(torch.__version__),
        "commit": sessions[-1]["commit"],
    }
    about = {"sessions": sessions, "settings": job.settings(), "scale_file": asdict(job.scale)}
    layers = layer_rows(run.model, conversion)
    weights = run.weights() if job.protocol in KEEP_WEIGHTS else {}
    metrics = metric_rows(run, held, layers, memory_figures(job, run), where)
    if not run.world.leads:
        return
    if weights:
        with atomic_write(out / "model.safetensors") as temporary:
            save_file({k: v.contiguous() for k, v in weights.items()}, temporary)
    with atomic_write(out / "run.json") as temporary:
        temporary.write_text(json.dumps(where | about, indent=2) + "\n", encoding="utf-8")
    _write_csv(out / "layers.csv", LAYERS, layers)
    _write_csv(out / "curve.csv", CURVE, run.curve[job.first_step :])
    schema.write_rows(out / "metrics.csv", metrics)


def layer_rows(model: nn.Module, conversion: Conversion) -> list[tuple]:
    """One row, as in `LAYERS`, for each linear of a converted model, in the model's order."""
    rows = []
    for name, module in model.named_modules():
        if name in conversion.swapped or name in conversion.kept:
            precision = conversion.recipe.name if name in conversion.swapped else "bf16"
            out_features, in_features = module.weight.shape
            reason = conversion.kept.get(name, "")
            rows.append((name, precision, in_features, out_features, reason))
    return rows


def memory_figures(job: Job, run: Run) -> dict[str, int | None]:
    """Bytes of the optimizer's states, and of what a forward pass of a micro-batch saves; of one rank."""
    settings = run.settings
    if run.world.shards:  # gathered weights would count as activations
        return {schema.OPTIMIZER_BYTES: optimizer_bytes(run.optimizer), schema.ACTIVATION_BYTES: None}
    tokens = next(microbatches(*job.batches[0], settings.microbatch, run.device))
    return {
        schema.OPTIMIZER_BYTES: optimizer_bytes(run.optimizer),
        schema.ACTIVATION_BYTES: saved_bytes(run.model, tokens, run.device.type),
    }


def metric_rows(
    run: Run, held: HeldOut, layers: list[tuple], memory: dict[str, int], where: dict[str, str]
) -> list[schema.Row]:
    """The run's figures; `where` holds the columns that all rows share."""
    quantised = [row for row in layers if not row[LAYERS.index("reason")]]
    last = run.column("train_loss")[-max(round(_TRAIN_LOSS_SHARE * run.settings.steps), 1) :]
    losses = dict.fromkeys(
        (schema.VALIDATION_LOSS, schema.VALIDATION_LOSS_BF16, schema.BITS_PER_BYTE, TRAIN_LOSS)
    )
    if not run.diverged:
        validation = run.last("validation_loss")
        losses[schema.VALIDATION_LOSS] = validation
        losses[schema.VALIDATION_LOSS_BF16] = run.validation_loss_in_bf16(held)
        losses[schema.BITS_PER_BYTE] = held.bits_per_byte(validation)
        losses[TRAIN_LOSS] = sum(last) / len(last)
    figures = losses | {
        schema.TOKENS: run.last("tokens"),
        schema.PARAMETERS: sum(parameter.numel() for parameter in run.model.parameters()),
        LINEARS_QUANTISED: len(quantised),
        SHARE_QUANTISED: _products(quantised) / _products(layers),
        schema.DIVERGED: int(bool(run.diverged)),
    }
    figures |= memory
    notes = {
        TRAIN_LOSS: f"mean of the last {len(last)} steps",
        LINEARS_QUANTISED: f"of {len(layers)}",
        SHARE_QUANTISED: "of all linears, with the output head",
        schema.ACTIVATION_BYTES: f"{run.settings.microbatch} x {run.settings.context} tokens",
    }
    if memory.get(schema.ACTIVATION_BYTES, 0) is None:
        notes[schema.ACTIVATION_BYTES] = (
            schema.NOT_RUN + "shards of weights, gathered, would count as activations"
        )
    if run.diverged:
        notes |= dict.fromkeys((*losses, schema.DIVERGED), run.diverged)
    return [
        schema.Row(
            metric=metric,
            value=value,
            unit=UNITS[metric],
            n=1,
            provenance="measured",
            note=notes.get(metric, ""),
            **where,
        )
        for metric, value in figures.items()
    ]


def _products(layers: Iterable[tuple]) -> int:
    """Multiplications a token in each of the three products of these linears."""
    return sum(row[LAYERS.index("in")] * row[LAYERS.index("out")] for row in layers)


def _write_csv(path: Path, header: tuple, rows: list) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)  # floats by repr, None as an empty cell
    with atomic_write(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")
