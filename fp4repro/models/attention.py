"""Causal grouped-query attention: each key and value head serves several query heads.

Hybrids have no positional embedding, since the Mamba blocks know the order of tokens; a pure
transformer takes RoPE, in the form that turns channel i with channel i + head_dim / 2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4repro.models.config import ModelConfig


class Attention(nn.Module):
    """Maps (batch, length, width) to the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        shapes = config.linears("attention")
        self.q = nn.Linear(*shapes["q"], bias=False)
        self.k = nn.Linear(*shapes["k"], bias=False)
        self.v = nn.Linear(*shapes["v"], bias=False)
        self.o = nn.Linear(*shapes["o"], bias=False)
        self.core = CausalAttention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
        if self.config.positions == "rope":
            q, k = (rotate(t, self.config.rope_theta) for t in (q, k))
        with torch.autocast(x.device.type, enabled=False):
            mixed = self.core(q, k, v)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _heads(self, t: Tensor) -> Tensor:
        """(batch, length, heads * head_dim) to (batch, heads, length, head_dim)."""
        return t.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class CausalAttention(nn.Module):
    """Mixes q, k and v (batch, heads, length, head_dim) and has no parameters: another one may stand
    in its place."""

    mixes = "attention"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type == "cpu":
            q, k, v = q.float(), k.float(), v.float()  # BF16 takes three times as long backwards
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def rotate(t: Tensor, theta: float) -> Tensor:
    """Turn t (batch, heads, length, head_dim) by position x theta^(-2i / head_dim), in float32."""
    half = t.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=t.device, dtype=torch.float32) / half)
    angles = torch.arange(t.shape[-2], device=t.device)[:, None] * rates  # (length, half)
    cos, sin = angles.cos(), angles.sin()
    first, second = t.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(t.dtype)
