"""The tensors that a trained model multiplies: weights, inputs and output gradients of its linears.

One forward and backward over held-out text, under BF16 autocast as in training; hooks hand over each
tensor as a matrix (rows, features) the moment it is there, so that none is kept. Linears outside the
blocks (the output head) stay in BF16 in every recipe and are left out (`Subject.linears`).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fp4repro.config import TOKEN_MULTIPLE, Scale
from fp4repro.data.batches import evenly
from fp4repro.data.tokens import TokenData, open_tokens
from fp4repro.errors import Fp4ReproError
from fp4repro.models import HybridModel, ModelConfig

WEIGHTS, ACTIVATIONS, GRADIENTS = "weights", "activations", "gradients"
TOKENS = 1024  # at least, in whole sequences

_MODEL, _DATA = "model.", "data."  # prefixes in run.json's settings


def open_run(folder: Path, data_folder: Path, scale: Scale) -> tuple[HybridModel, TokenData, str]:
    """A finished run's model, its token files and its name (`bf16/seed-0`).

    Raises Fp4ReproError where the folder holds no whole run of this scale, or the data are others.
    """
    again = "run that training again"
    path = folder / "run.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        settings, name, of_scale = about["settings"], about["setting"], about["scale"]
    except FileNotFoundError:
        raise Fp4ReproError(f"{folder} holds no finished run: {path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        raise Fp4ReproError(f"{path} is damaged ({error}): {again}") from None
    if of_scale != scale.scale:
        raise Fp4ReproError(f"{path} is of a run at scale {of_scale!r}, not {scale.scale!r}")
    data = open_tokens(data_folder, scale)
    for file, checksum in data.checksums.items():
        if settings.get(_DATA + file) != checksum:
            raise Fp4ReproError(f"{data_folder / file} is not what {folder} was trained on: {again}")
    config = {k.removeprefix(_MODEL): v for k, v in settings.items() if k.startswith(_MODEL)}
    model = HybridModel(ModelConfig.from_dict(config), device="meta")
    weights = folder / "model.safetensors"
    try:
        model.load_state_dict(load_file(weights), assign=True)
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise Fp4ReproError(
            f"{weights} is missing, damaged or of another model ({reason}): {again}"
        ) from None
    return model, data, name


def held_out_sequences(data: TokenData, scale: Scale, least: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 (sequences, context), at least so many, spread evenly over the held-out
    text."""
    context = scale.training.context
    count = -(-least // context)
    while count * context % TOKEN_MULTIPLE:
        count += 1
    tokens, targets = evenly(data.validation, count, context)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def visit_tensors(
    layers: Mapping[str, nn.Linear], loss: Callable[[], Tensor], visit: Callable[[str, str, Tensor], None]
) -> None:
    """Call `visit(kind, layer's name, matrix)` for each tensor of one forward and backward of `loss`:
    weights (out, in) in their own type, inputs (tokens, in) and output gradients (tokens, out) in the
    product's."""

    def watch(name: str) -> Callable:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach().to(output.dtype)  # as autocast hands it to the product
            visit(ACTIVATIONS, name, x.flatten(0, -2))
            output.register_hook(lambda gradient: visit(GRADIENTS, name, gradient.flatten(0, -2)))

        return hook

    for name, layer in layers.items():
        visit(WEIGHTS, name, layer.weight.detach())
    handles = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    try:
        loss().backward()
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers.values():
            layer.weight.grad = None
