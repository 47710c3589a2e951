"""Tiled attention with quantised operands, as one function of autograd.

    S = Q K^T / sqrt(d),  P = softmax(S),  O = P V
    dV = P^T dO,  dP = dO V^T,  D = rowsum(dO * O),  dS = P (dP - D),
    dQ = dS K / sqrt(d),  dK = dS^T Q / sqrt(d)

as FlashAttention has them (arXiv 2205.14135): the backward forms P again from what the forward kept,
Q, K and V and the log-sum-exp of each row. Gradients pass the quantisers straight through. Sums are in
float32, or in float64 for inputs of that type.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4repro.attention.operands import Kept
from fp4repro.attention.passes import Work
from fp4repro.attention.tiles import Shape, pad_positions
from fp4repro.core.random import RandomKey
from fp4repro.recipes.attention import VIEWS, AttentionRecipe


class TiledAttention(torch.autograd.Function):
    """q (batch, heads, queries, head_dim), k and v (batch, key heads, keys, head_dim) -> like q."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        recipe: AttentionRecipe,
        causal: bool,
        scale: float,
        key: RandomKey | None,
    ) -> Tensor:
        (batch, heads, queries, _), (_, kv_heads, keys, _) = q.shape, k.shape
        shape = Shape(batch * kv_heads, heads // kv_heads, queries, keys, causal, recipe.format.block[1])
        work = Work(recipe, shape, scale, key, q.dtype)
        mean = _mean(v) if "v" in recipe.smooth else None
        if mean is not None:
            v = (v - mean).to(v.dtype)
        if "k" in recipe.smooth:
            k = (k - _mean(k)).to(k.dtype)
        kept = [
            Kept.of(_heads_first(x, shape, group), recipe, name in recipe.views)
            for name, x, group in zip(VIEWS, (q, k, v), (shape.group, 1, 1), strict=True)
        ]
        out, lse, term = work.forward(*kept, None if mean is None else mean.flatten(0, 1))
        parts, ctx.about = zip(*(x.save() for x in kept), strict=True)
        ctx.save_for_backward(*(t for part in parts for t in part), lse, term)
        ctx.work, ctx.shapes = work, (q.shape, k.shape)
        return out[:, :, :queries].reshape(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        work, (q_shape, k_shape) = ctx.work, ctx.shapes
        shape, recipe = work.shape, work.recipe
        saved = list(ctx.saved_tensors)
        kept = [Kept.load(saved, about) for about in ctx.about]
        lse, term = saved
        with torch.autocast(gradient.device.type, enabled=False):
            do = Kept.of(_heads_first(gradient.to(work.dtype), shape, shape.group), recipe, view=False)
            dq, dk, dv = work.backward(*kept, do, lse, term)
        dq = dq[:, :, : shape.queries].reshape(q_shape)
        dk, dv = (t[:, :, : shape.keys].reshape(k_shape) for t in (dk, dv))
        if "k" in recipe.smooth:
            dk = (dk - _mean(dk)).to(dk.dtype)
        return dq, dk, dv, None, None, None, None


def _mean(x: Tensor) -> Tensor:
    """Over positions, (batch, heads, 1, head_dim)."""
    return x.mean(-2, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))


def _heads_first(x: Tensor, shape: Shape, group: int) -> Tensor:
    """(batch, heads, positions, head_dim) -> (batch x key heads, group, padded positions, head_dim)."""
    x = x.reshape(shape.heads, group, *x.shape[2:])
    return pad_positions(x, shape.padded(x.shape[-2]))
