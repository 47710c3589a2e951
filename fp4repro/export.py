"""A converted model's weights as an NVFP4 checkpoint of `compressed-tensors`, which vLLM loads.

What is written is what the trained forward multiplied by, bit for bit: the codes and scales of the
fprop weight slot, a 16x16 tile's scale repeated on its rows being a valid 1x16 scale. Choosing finer
1x16 scales anew would lower the weights' error, but deploy weights that the network never ran with.

Loaders join some linears into one (q, k, v; gate and up) and keep a single tensor scale for them. The
largest member's is given to all, codes are kept and block scales rounded anew, so each value moves by
at most one E4M3 rounding (1/16 of it; more where a scale falls below E4M3's normals).
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fp4repro.core import kernels
from fp4repro.core.formats import E2M1, E4M3
from fp4repro.core.rounding import round_nearest
from fp4repro.core.tensor import QuantizedTensor, load_scales, store_scales
from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write
from fp4repro.layers import Conversion, QuantLinear
from fp4repro.layers.lora_svd import LoraSVDLinear

# Linears of one parent that loaders join, by the names that Hugging Face models use.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
FORMAT = "nvfp4-pack-quantized"
BLOCK = 16


@dataclass(frozen=True)
class Exported:
    """What `export_compressed_tensors` wrote.

    quantised  names of the linears in NVFP4
    ignored    names of the linears left as they are, with the reason
    rescaled   for each linear whose tensor scale is another member's of its fused group, the largest
               relative change of a non-zero block scale; 1.0 where one became zero
    """

    quantised: list[str]
    ignored: dict[str, str]
    rescaled: dict[str, float]


def export_compressed_tensors(
    model: nn.Module,
    report: Conversion,
    folder: str | os.PathLike,
    fused: Iterable[Sequence[str]] = FUSED,
) -> Exported:
    """Write `model.safetensors` and `config.json` into `folder`, weights only (W4A16).

    report  what `convert` returned for this model
    fused   groups of linears that share one tensor scale: last parts of names, under one parent
    Parameters that are not in NVFP4 keep their type. Activation scales are not exported: training
    takes each tensor's own amax, whereas a checkpoint would have to hold one calibrated on data.
    """
    weights = {name: _weight(name, model.get_submodule(name)) for name in report.swapped}
    if not weights:
        raise Fp4ReproError(f"recipe {report.recipe.name} left no linear quantised: nothing to export")
    rescaled = _share_tensor_scales(weights, report.kept, fused)
    tensors = _tensors(model, weights)
    config = _model_config(model) | {"quantization_config": _quantization_config(list(report.kept))}
    folder = Path(folder)
    # The configuration comes last: where it is, the weights are whole.
    with atomic_write(folder / "config.json") as config_file:
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        with atomic_write(folder / "model.safetensors") as weights_file:
            save_file(tensors, weights_file, metadata={"format": "pt"})
    return Exported(list(weights), dict(report.kept), rescaled)


def _weight(name: str, layer: nn.Module) -> QuantizedTensor:
    if not isinstance(layer, QuantLinear):
        raise Fp4ReproError(f"{name} is no longer a converted linear: export with the report of its convert")
    if isinstance(layer, LoraSVDLinear):
        raise Fp4ReproError(
            f"{name} multiplies leading directions in BF16 beside its residual (lora_svd), which {FORMAT} "
            "has no place for: convert the model to the base recipe, lora_svd=None, and export that"
        )
    slot = layer.plan.slots["w_fprop"]
    fmt = slot.format
    if fmt is None or (fmt.element, fmt.scale) != (E2M1, E4M3) or fmt.block[1] != BLOCK:
        kind = "BF16" if fmt is None else f"{fmt.name} in blocks of {fmt.block[0]}x{fmt.block[1]}"
        raise Fp4ReproError(
            f"{name} multiplies weights in {kind}; {FORMAT} holds E2M1 with E4M3 scales of 1x{BLOCK} only"
        )
    if slot.stochastic or slot.hadamard:
        raise Fp4ReproError(
            f"{name} multiplies weights that are rounded stochastically or Hadamard-transformed, which "
            "a checkpoint cannot say: export a recipe without either on w_fprop"
        )
    weight = layer.quantised_weight("w_fprop")
    if not weight.amax.isfinite():
        raise Fp4ReproError(f"{name} has weights that are NaN or infinite: export an earlier checkpoint")
    return weight


def _share_tensor_scales(
    weights: dict[str, QuantizedTensor], kept: Mapping[str, str], fused: Iterable[Sequence[str]]
) -> dict[str, float]:
    """Give each group its largest member's tensor scale, in place; the changes of block scales."""
    rescaled = {}
    for group in fused:
        for parent in {name.rpartition(".")[0] for name in weights}:
            names = [f"{parent}.{last}".lstrip(".") for last in group]
            members = [name for name in names if name in weights]
            for name in names:
                if members and name in kept:
                    raise Fp4ReproError(
                        f"{name} stays in BF16 ({kept[name]}), but loaders join it with {members[0]}, which "
                        "is in NVFP4: keep all or none of them in BF16, or pass `fused` without this group"
                    )
            if len(members) > 1:
                amax = torch.stack([weights[name].amax for name in members]).max()
                for name in members:
                    if weights[name].amax != amax:
                        weights[name], rescaled[name] = _rescale(weights[name], amax)
    return rescaled


def _rescale(q: QuantizedTensor, amax: Tensor) -> tuple[QuantizedTensor, float]:
    """The same codes under another tensor's amax, and the largest relative change of a block scale."""
    shared = kernels.tensor_scales(amax, q.format)[1]
    old = load_scales(q.scales, q.format)
    wanted = old * (q.tensor_scale / shared)
    new = round_nearest(wanted, q.format.scale)
    used = wanted > 0
    change = ((new - wanted).abs() / wanted)[used]
    q = dataclasses.replace(q, scales=store_scales(new, q.format), amax=amax)
    return q, float(change.max()) if used.any() else 0.0


def _tensors(model: nn.Module, weights: Mapping[str, QuantizedTensor]) -> dict[str, Tensor]:
    """All that the checkpoint holds. Tied parameters are written under each of their names."""
    tensors = {}
    for name, value in model.state_dict().items():
        layer, _, last = name.rpartition(".")
        if layer in weights and last == "weight":
            q = weights[layer]
            tensors[f"{name}_packed"] = q.codes
            tensors[f"{name}_scale"] = q.scales
            # The package divides by it, as by Transformer Engine's encode scale, 2688 / amax.
            tensors[f"{name}_global_scale"] = kernels.tensor_scales(q.amax, q.format)[0].reshape(1)
        else:
            tensors[name] = value
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def _model_config(model: nn.Module) -> dict:
    """The model's own configuration, where it has one, as Hugging Face writes it."""
    config = getattr(model, "config", None)
    if hasattr(config, "to_diff_dict"):  # Hugging Face's; JSON types already
        fields = json.loads(config.to_json_string(use_diff=True))
    else:
        fields = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else {}
    return fields | {"architectures": [type(model).__name__]}


def _quantization_config(ignored: list[str]) -> dict:
    scheme = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {"targets": ["Linear"], "weights": scheme, "format": FORMAT}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }
