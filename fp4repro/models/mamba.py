"""Mamba-2 mixer: in_proj, short causal convolution, selective scan, gated norm, out_proj.

in_proj gives, in this order, the gate z, the scan's inputs x, B and C (which pass through the
convolution and SiLU) and a time step dt a head. The scan's output times SiLU(z) is normalised group
by group. Everything between the two linears is in float32.

Initial values are those of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, and its released code): A
uniform in [-16, -1], dt log-uniform in [0.001, 0.1], D one. No bias, as in the NVFP4 paper.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4repro.models.config import ModelConfig
from fp4repro.models.scan import choose_scan

A_RANGE = (1.0, 16.0)  # of -A
DT_RANGE = (1e-3, 1e-1)


class Mamba2(nn.Module):
    """Maps (batch, length, width) to the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        shapes = config.linears("mamba")
        self.in_proj = nn.Linear(*shapes["in_proj"], bias=False)
        self.conv_weight = nn.Parameter(torch.empty(config.conv_channels, config.conv))
        self.dt_bias = nn.Parameter(torch.empty(config.mamba_heads))
        self.A_log = nn.Parameter(torch.empty(config.mamba_heads))
        self.D = nn.Parameter(torch.empty(config.mamba_heads))
        self.norm_weight = nn.Parameter(torch.empty(config.mamba_inner))
        self.out_proj = nn.Linear(*shapes["out_proj"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.in_proj(x)
        with torch.autocast(x.device.type, enabled=False):
            mixed = self._mix(projected.float())
        return self.out_proj(mixed)

    def _mix(self, projected: Tensor) -> Tensor:
        """From in_proj's output to out_proj's input, (batch, length, inner)."""
        c = self.config
        batch, length, _ = projected.shape
        z, xBC, dt = projected.split([c.mamba_inner, c.conv_channels, c.mamba_heads], dim=-1)
        xBC = F.silu(causal_conv(xBC, self.conv_weight))
        x, B, C = xBC.split([c.mamba_inner, c.groups * c.state, c.groups * c.state], dim=-1)
        y = choose_scan(x.device.type).scan(
            x.view(batch, length, c.mamba_heads, c.mamba_head_dim),
            F.softplus(dt + self.dt_bias),
            -self.A_log.exp(),
            B.view(batch, length, c.groups, c.state),
            C.view(batch, length, c.groups, c.state),
            self.D,
            c.chunk,
        )
        y = y.view(z.shape) * F.silu(z)
        y = y.view(batch, length, c.groups, -1)
        return F.rms_norm(y, y.shape[-1:], eps=c.norm_eps).view(z.shape) * self.norm_weight

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Set all but the linears."""

        def uniform(parameter: Tensor, low: float, high: float) -> Tensor:
            return torch.empty(parameter.shape).uniform_(low, high, generator=generator)

        bound = 1 / math.sqrt(self.config.conv)
        self.conv_weight.copy_(uniform(self.conv_weight, -bound, bound))
        dt = uniform(self.dt_bias, *map(math.log, DT_RANGE)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        self.A_log.copy_(uniform(self.A_log, *A_RANGE).log())
        self.D.fill_(1)
        self.norm_weight.fill_(1)


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution over tokens t - taps + 1 to t: x (batch, length, channels).

    As a 2-D convolution in channels-last layout, which x has already: on a CPU half the time of
    conv1d, which wants the tokens last.
    """
    channels, taps = weight.shape
    x = F.pad(x, (0, 0, taps - 1, 0)).mT.unsqueeze(2)  # (batch, channels, 1, taps - 1 + length)
    x = x.contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, weight[:, None, None], groups=channels).squeeze(2).mT
