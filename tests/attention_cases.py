"""Data and the plain definition of attention, for tests of `fp4_attention`."""

import math

import torch

from fp4repro import AttentionRecipe, fp4_attention

OFF = AttentionRecipe(lowered=(), views=(), high="operands")
FULL_STACK = AttentionRecipe(high="operands")  # with V as a view
WITHOUT_V = FULL_STACK.replace(views=("q", "k"))  # the spec's row


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def draw(seed=0, heads=(1, 1), length=256, head_dim=64, batch=1, dtype=torch.float32):
    """q, k, v and dO, all N(0, 1)."""
    generator = seeded(seed)
    return [
        torch.randn(batch, h, length, head_dim, generator=generator, dtype=dtype)
        for h in (heads[0], heads[1], heads[1], heads[0])
    ]


def plain(q, k, v, causal=True):
    """softmax(q k^T / sqrt(d)) v by its definition, key heads repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v


def with_gradients(attend, q, k, v, do):
    """O, dQ, dK, dV."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    out.backward(do)
    return out.detach(), *(x.grad for x in leaves)


def ours(recipe, q, k, v, do, causal=True, key=None):
    return with_gradients(lambda *x: fp4_attention(*x, recipe, causal, key), q, k, v, do)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def errors(recipe, data):
    """Of O, dQ, dK and dV against float64, each the mean over the data sets."""
    all_of = []
    for tensors in data:
        exact = with_gradients(plain, *(x.double() for x in tensors))
        all_of.append([relative(a, b) for a, b in zip(ours(recipe, *tensors), exact, strict=True)])
    return torch.tensor(all_of).mean(0).tolist()
