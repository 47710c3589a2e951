"""Attention of transformers' models, by transformers' own interface (`AttentionInterface.register`).

A model calls the function that its configuration names, with the attention module as first argument;
the module's plan says what to do. Masks come from transformers' own rule for torch's attention: there
is none where a batch has no padding and the model is causal, and any other cannot be cut into tiles.
Where a run is not training and a cache is filled, single queries see all keys without a mask.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fp4repro.errors import Fp4ReproError

NAME = "fp4repro"
_BEFORE = "_attention_before_fp4repro"  # the implementation that a configuration named


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """query (batch, heads, length, head_dim) -> (batch, length, heads, head_dim), and no weights."""
    unknown = [k for k in ("softcap", "position_bias", "s_aux", "sinks") if more.get(k) is not None]
    if more.get("sliding_window") and more["sliding_window"] < key.shape[-2]:
        unknown.append("sliding_window")
    if attention_mask is not None:
        unknown.append("attention_mask (padding, or packed sequences)")
    if dropout:
        unknown.append("dropout")
    if unknown:
        raise Fp4ReproError(
            f"{type(module).__name__} was called with {' and '.join(unknown)}, which attention in tiles "
            "does not have: give whole sequences without padding, or leave this attention in BF16"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mixed = module.plan.attend(query, key, value, bool(causal and query.shape[-2] > 1), scaling)
    return mixed.transpose(1, 2).contiguous(), None


def attention_modules(model: nn.Module, wanted: bool) -> Iterator[tuple[str, nn.Module]]:
    """The attention modules of every transformers model in `model`, which from now on call `attention`,
    or, where not `wanted`, those that did so far and now call what they called before."""
    theirs = sys.modules.get("transformers.modeling_utils")  # who has such a model has imported it
    if theirs is None:
        return
    inside = ""  # prefix of the last such model: those within it are its parts
    for prefix, part in list(model.named_modules()):
        if not isinstance(part, theirs.PreTrainedModel) or (inside and prefix.startswith(inside)):
            continue
        inside = f"{prefix}."
        if not wanted and part.config._attn_implementation != NAME:
            continue
        found = [(n, m) for n, m in part.named_modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
        if found:
            _switch(part, wanted)
            yield from ((f"{prefix}.{name}".lstrip("."), module) for name, module in found)
        if not prefix:
            return


def _switch(model: nn.Module, wanted: bool) -> None:
    _register(NAME, attention)
    config = model.config
    if wanted and config._attn_implementation != NAME:
        setattr(model, _BEFORE, config._attn_implementation)
    model.set_attn_implementation(NAME if wanted else getattr(model, _BEFORE, "sdpa"))


def _register(name: str, function: Callable) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


@contextmanager
def implementation(model: nn.Module, name: str, function: Callable) -> Iterator[None]:
    """While it lasts, `function` is the attention of a transformers model, under a name of its own."""
    before = model.config._attn_implementation
    _register(name, function)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def torchs_attention(*arguments: object, **more: object) -> tuple[Tensor, None]:
    """What transformers calls for its implementation "sdpa"."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*arguments, **more)
