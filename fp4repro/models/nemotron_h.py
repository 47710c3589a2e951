"""The hybrid in transformers' `nemotron_h` layout, and back: settings, names and shapes of weights.

Both hold the same model (NVIDIA 2025, arXiv 2504.03624); only names differ, and the convolution's
weight, (channels, taps) here and (channels, 1, taps) there. Two things have no twin here and are
refused: a bias (of the convolution or of linears; zero ones are dropped) and experts. transformers
also keeps dt above `time_step_min`, which Mamba-2 does not: it is written as next to nothing.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fp4repro.errors import Fp4ReproError
from fp4repro.files import atomic_write
from fp4repro.models.config import ModelConfig

LAYER_TYPES = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
# Older releases spell the pattern as letters or with other words.
_LETTERS = {v: k for k, v in LAYER_TYPES.items()} | {"mamba": "M", "attention": "*"}

_OUTSIDE = {
    "embedding.weight": "model.embeddings.weight",
    "norm.weight": "model.norm_f.weight",
    "head.weight": "lm_head.weight",
}
_INSIDE = {"conv_weight": "conv1d.weight", "norm_weight": "norm.weight"}
_INSIDE |= {f"{name}.weight": f"{name}_proj.weight" for name in ("up", "down", "q", "k", "v", "o")}
_OUTSIDE_BACK = {v: k for k, v in _OUTSIDE.items()}
_INSIDE_BACK = {v: k for k, v in _INSIDE.items()}

_SIZES = {  # ours -> theirs
    "width": "hidden_size",
    "vocabulary": "vocab_size",
    "ffn_width": "intermediate_size",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mamba_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "state": "ssm_state_size",
    "groups": "n_groups",
    "conv": "conv_kernel",
    "chunk": "chunk_size",
    "init_std": "initializer_range",
    "norm_eps": "layer_norm_epsilon",
}
_LEAST_DT = 1e-30


def to_nemotron_h(
    config: ModelConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of transformers' NemotronHConfig, and the state dict of its NemotronHForCausalLM."""
    if config.positions != "none":
        raise Fp4ReproError(f"nemotron_h has no positional embedding, but the model has {config.positions!r}")
    settings = {theirs: getattr(config, ours) for ours, theirs in _SIZES.items() if getattr(config, ours)}
    settings |= {
        "layers_block_type": [LAYER_TYPES[letter] for letter in config.pattern],
        "use_conv_bias": False,
        "tie_word_embeddings": False,
        "time_step_min": _LEAST_DT,
    }
    state = {}
    for name, weight in weights.items():
        theirs = _OUTSIDE.get(name) or _rename(name, "blocks", "model.layers", _INSIDE)
        state[theirs] = weight.unsqueeze(1) if theirs.endswith("conv1d.weight") else weight
    return settings, state


def from_nemotron_h(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and state dict of a `nemotron_h` model's `config.json` and state dict."""
    kinds = settings.get("layers_block_type") or list(settings.get("hybrid_override_pattern") or "")
    pattern = "".join(_LETTERS.get(kind, kind) for kind in kinds)
    unknown = sorted({letter for letter in kinds if _LETTERS.get(letter, letter) not in LAYER_TYPES})
    if unknown or not pattern:
        raise Fp4ReproError(
            f"the nemotron_h settings have blocks of kind {', '.join(unknown) or 'none at all'}; known here "
            f"are {', '.join(LAYER_TYPES.values())}"
        )
    config = ModelConfig.from_dict(
        {"pattern": pattern}
        | {ours: settings[theirs] for ours, theirs in _SIZES.items() if theirs in settings}
    )
    state = {}
    for name, weight in weights.items():
        if name.endswith(".bias") and not name.endswith("dt_bias"):
            if weight.any():
                raise Fp4ReproError(f"{name} is not zero; models here have no biases")
            continue
        ours = _OUTSIDE_BACK.get(name) or _rename(name, "model.layers", "blocks", _INSIDE_BACK)
        state[ours] = weight.squeeze(1) if ours.endswith("conv_weight") else weight
    return config, state


def save_nemotron_h(config: ModelConfig, weights: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors`, which `AutoModelForCausalLM.from_pretrained` reads."""
    settings, state = to_nemotron_h(config, weights)
    about = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], **settings}
    with atomic_write(Path(folder) / "model.safetensors") as path:
        # The format is what transformers asks for in a file of weights.
        save_file({name: t.contiguous() for name, t in state.items()}, path, metadata={"format": "pt"})
    with atomic_write(Path(folder) / "config.json") as path:
        path.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _rename(name: str, prefix: str, other: str, inside: Mapping[str, str]) -> str:
    """A block's weight under the other layout's name."""
    found = re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.(norm\.weight|mixer\.(.+))", name)
    if not found:
        raise Fp4ReproError(f"the weight {name!r} belongs to no part of a hybrid in this layout")
    block, rest, within = found.groups()
    return (
        f"{other}.{block}.{rest}" if within is None else f"{other}.{block}.mixer.{inside.get(within, within)}"
    )
