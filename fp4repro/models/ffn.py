"""Feed-forward network with squared ReLU, down(relu(up(x))^2), without gate (So et al. 2021)."""

import torch.nn.functional as F
from torch import Tensor, nn

from fp4repro.models.config import ModelConfig


class FeedForward(nn.Module):
    """Maps (batch, length, width) to the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shapes = config.linears("ffn")
        self.up = nn.Linear(*shapes["up"], bias=False)
        self.down = nn.Linear(*shapes["down"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())
