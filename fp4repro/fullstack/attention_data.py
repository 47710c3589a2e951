"""Q, K, V and dO that attention is studied on: drawn, from a run's hybrid, or from a Hugging Face model.

A trained model gives what its attention modules were called with on held-out text, and the gradient of
the loss at their outputs, in its own type; queries and keys after positions and norms.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from fp4repro.attention import huggingface
from fp4repro.errors import Fp4ReproError

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, dO: (batch, heads, length, head_dim)

LENGTH, HEAD_DIM = 256, 64  # of drawn data
BIAS = 2.5  # standard deviations of a channel


def _gaussian(draw: np.random.Generator) -> list[np.ndarray]:
    return list(draw.standard_normal((4, 1, 1, LENGTH, HEAD_DIM)))


def _common_v(draw: np.random.Generator) -> list[np.ndarray]:
    q, k, v, do = _gaussian(draw)
    return [q, k, v / 2 + 2 * draw.standard_normal(HEAD_DIM), do]


def _biased_k(draw: np.random.Generator) -> list[np.ndarray]:
    q, k, v, do = _gaussian(draw)
    return [q, k + BIAS * draw.standard_normal(HEAD_DIM), v, do]


DRAWN: dict[str, Callable[[np.random.Generator], list[np.ndarray]]] = {
    "gaussian": _gaussian,
    "common V": _common_v,
    "biased K": _biased_k,
}


def drawn(name: str, seed: int) -> Tensors:
    """One set of N(0, 1) tensors, V with a common component or K with a bias a channel; float32."""
    key = np.array([seed, list(DRAWN).index(name)], dtype=np.uint64)
    arrays = DRAWN[name](np.random.Generator(np.random.Philox(key=key)))
    return tuple(torch.from_numpy(a.astype(np.float32)) for a in arrays)


def without_common_v(tensors: Tensors) -> Tensors:
    """The same with V less its mean over the keys: what is common to all keys is gone."""
    q, k, v, do = tensors
    return q, k, v - v.mean(-2, keepdim=True), do


def common_share(x: Tensor) -> float:
    """Share of the sum of squares that the mean over positions makes up, over all heads."""
    x = x.double()
    return (x.mean(-2).square().sum() * x.shape[-2] / x.square().sum()).item()


def of_hybrid(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensors]:
    """By name of each attention core of the hybrid, while `loss()` runs it forward and backward."""
    found: dict[str, Tensors] = {}

    def watch(name: str) -> Callable:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            _on_gradient(found, name, inputs, output)

        return hook

    cores = {n: m for n, m in model.named_modules() if getattr(type(m), "mixes", None) == "attention"}
    handles = [module.register_forward_hook(watch(name)) for name, module in cores.items()]
    try:
        loss().backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return {name: found[name] for name in cores}


def of_transformer(model: nn.Module, tokens: Tensor) -> dict[str, Tensors]:
    """The same of a Hugging Face causal language model on tokens (batch, length)."""
    found: dict[str, Tensors] = {}
    names = {id(m): n for n, m in model.named_modules()}

    def attention(module, query, key, value, mask, **more):
        out, weights = huggingface.torchs_attention(module, query, key, value, mask, **more)
        _on_gradient(found, names[id(module)], (query, key, value), out, lambda t: t.transpose(1, 2))
        return out, weights

    with huggingface.implementation(model, "fp4repro_watch", attention):
        model(tokens, labels=tokens).loss.backward()
    model.zero_grad()
    if not found:
        raise Fp4ReproError(
            f"{type(model).__name__} calls no attention by transformers' interface: nothing to study"
        )
    return dict(sorted(found.items(), key=lambda item: list(names.values()).index(item[0])))


def _on_gradient(
    found: dict[str, Tensors],
    name: str,
    inputs: tuple[Tensor, ...],
    output: Tensor,
    heads_first: Callable[[Tensor], Tensor] = lambda t: t,
) -> None:
    kept = [x.detach() for x in inputs]
    output.register_hook(lambda g: found.__setitem__(name, (*kept, heads_first(g.detach()))))


def evenly(tensors: dict[str, Tensors], count: int) -> Iterator[tuple[str, Tensors]]:
    """At most `count` layers, spread over the depth, the first and the last among them."""
    names = list(tensors)
    places = sorted({round(i) for i in np.linspace(0, len(names) - 1, min(count, len(names)))})
    for place in places:
        yield names[place], tensors[names[place]]
