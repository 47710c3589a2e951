"""How much each of attention's seven products loses when it alone is lowered, and the named sets.

Relative error (Frobenius) of O, dQ, dK and dV against float64, all other operands as they came. The
claim of arXiv 2607.04422 is that PV and dO V^T are the sensitive ones. On drawn data they are where V has
a component common to all keys, so each model's tensors are studied with it and without.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from fp4repro.attention import fp4_attention
from fp4repro.config import load_scale
from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity.subject import of_pretrained
from fp4repro.fidelity.tensors import held_out_sequences, open_run
from fp4repro.fullstack import attention_data as data
from fp4repro.recipes import ATTENTION_PRODUCTS, AttentionRecipe
from fp4repro.report import attention_tables as names
from fp4repro.report.schema import Row, write_rows
from fp4repro.train import provenance

_ALONE = AttentionRecipe(lowered=(), views=(), high="operands")
_STACK = AttentionRecipe(high="operands")


def _more(*products: str, **changes: object) -> AttentionRecipe:
    return _STACK.replace(lowered=(*_STACK.lowered, *products), **changes)


SETTINGS: dict[str, AttentionRecipe] = {
    "QK^T, both times": _ALONE.replace(lowered=("qk", "qk_again")),
    "QK^T, forward": _ALONE.replace(lowered=("qk",)),
    "QK^T, backward": _ALONE.replace(lowered=("qk_again",)),
    "PV": _ALONE.replace(lowered=("pv",)),
    "P^T dO": _ALONE.replace(lowered=("p_do",)),
    "dO V^T": _ALONE.replace(lowered=("do_v",)),
    "dS K": _ALONE.replace(lowered=("ds_k",)),
    "dS^T Q": _ALONE.replace(lowered=("ds_q",)),
    "full-stack, V in BF16": _STACK.replace(views=("q", "k")),
    "full-stack": _STACK,
    "full-stack, requantised": _STACK.replace(reuse="requant"),
    "full-stack, smooth K": _STACK.replace(smooth=("k",)),
    "full-stack, smooth V": _STACK.replace(smooth=("v",)),
    "full-stack, smooth K and V": _STACK.replace(smooth=("k", "v")),
    "full-stack + PV": _more("pv"),
    "full-stack + PV, second output": _more("pv", row_term="high_output"),
    "full-stack + dO V^T": _more("do_v"),
    "full-stack + PV + dO V^T, smooth V": _more("pv", "do_v", smooth=("v",)),
    "all seven": _ALONE.replace(lowered=ATTENTION_PRODUCTS),
    "control: P of the backward is another": _ALONE.replace(lowered=("qk", "ds_k", "ds_q")),
}
OFF = _ALONE
OUTPUTS = (names.ERROR_O, names.ERROR_DQ, names.ERROR_DK, names.ERROR_DV)
SEEDS = range(3)
LAYERS = 4  # of a model, at most


def relative_errors(tensors: data.Tensors, settings: Mapping[str, AttentionRecipe] = SETTINGS) -> dict:
    """Errors of O, dQ, dK and dV by setting."""
    exact = _run(OFF, [t.double() for t in tensors])
    single = [t.float() for t in tensors]
    return {
        name: [
            ((a.double() - b).norm() / b.norm()).item() for a, b in zip(_run(r, single), exact, strict=True)
        ]
        for name, r in settings.items()
    }


def _run(recipe: AttentionRecipe, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    *leaves, gradient = (t.detach() for t in tensors)
    leaves = [t.clone().requires_grad_() for t in leaves]
    out = fp4_attention(*leaves, recipe)
    out.backward(gradient)
    return [out.detach(), *(t.grad for t in leaves)]


def study(name: str, sets: Mapping[str, data.Tensors], note: str, where: Mapping[str, str]) -> Iterator[Row]:
    """Rows of one kind of data: means over its sets (seeds or layers), with the least and the largest."""
    errors = [relative_errors(tensors) for tensors in sets.values()]

    def row(setting: str, metric: str, values: list[float]) -> Row:
        spread = f"{min(values):.3f} to {max(values):.3f} over {', '.join(sets)}; {note}"
        mean = sum(values) / len(values)
        setting = names.setting(name, setting)
        return Row(
            experiment=names.EXPERIMENT,
            setting=setting,
            metric=metric,
            value=mean,
            unit="1",
            n=1,
            note=spread,
            **where,
        )

    for place, metric in ((1, names.COMMON_K), (2, names.COMMON_V)):
        yield row(names.DATA, metric, [data.common_share(t[place]) for t in sets.values()])
    for setting in SETTINGS:
        for place, metric in enumerate(OUTPUTS):
            yield row(setting, metric, [e[setting][place] for e in errors])


def model_rows(
    name: str, layers: dict[str, data.Tensors], where: Mapping[str, str], note: str
) -> Iterator[Row]:
    """A trained model's rows, with the common component of V and without."""
    chosen = dict(data.evenly(layers, LAYERS))
    yield from study(name, chosen, note, where)
    centred = {n: data.without_common_v(t) for n, t in chosen.items()}
    yield from study(f"{name}{names.CENTRED}", centred, f"V less its mean over keys; {note}", where)


def transformer_rows(
    name: str, model: nn.Module, tokens: torch.Tensor, where: Mapping[str, str], note: str
) -> Iterator[Row]:
    """Rows of a Hugging Face causal language model that is loaded, on tokens (batch, length); `note` says
    which model and tokens they are."""
    layers = data.of_transformer(model, tokens)
    yield from model_rows(name, layers, where, f"{len(layers)} attention layers of {note}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=Path, required=True, help="scale file, configs/scales/*.yaml")
    parser.add_argument("--run", dest="folder", type=Path, help="folder of a finished run of the hybrid")
    parser.add_argument("--data", type=Path, help="folder of token files that the run was trained on")
    parser.add_argument("--model", help="a pretrained model, by a name that fp4repro.pretrained knows")
    parser.add_argument("--text", type=Path, help="UTF-8 text in place of the corpus's held-out part")
    parser.add_argument("--tokens", type=int, default=512, help="of that text")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")


def run(arguments: argparse.Namespace) -> None:
    """Write the study's rows: drawn data, then the models that were named."""
    if bool(arguments.folder) != bool(arguments.data):
        raise Fp4ReproError("--run and --data belong together: give both or neither")
    # Many kinds of operands, each for little work: compiling them would take longer.
    os.environ.setdefault("FP4REPRO_COMPILE", "0")
    scale = load_scale(arguments.scale)
    torch.set_num_threads(scale.threads)
    where = provenance.columns(scale.scale, torch.device("cpu"))
    rows: list[Row] = []
    for name in data.DRAWN:
        sets = {f"seed {seed}": data.drawn(name, seed) for seed in SEEDS}
        rows += study(name, sets, f"{data.LENGTH} tokens, one head of {data.HEAD_DIM}", where)
    if arguments.folder:
        model, held, name = open_run(arguments.folder, arguments.data, scale)
        tokens, targets = held_out_sequences(held, scale)

        def loss() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(tokens, targets)

        layers = data.of_hybrid(model, loss)
        if layers:
            note = f"{len(layers)} attention layers, {tokens.numel()} held-out tokens"
            rows += model_rows(f"hybrid {name}", layers, where, note)
    if arguments.model:
        subject = of_pretrained(arguments.model, scale, arguments.tokens, arguments.text)
        rows += transformer_rows(subject.name, subject.model, subject.tokens, where, subject.note)
    write_rows(arguments.out, rows)
