"""Feed-forward network with squared ReLU, down(relu(up(x))^2) (So et al. 2021), as the NVFP4 paper's
models have it, or with SwiGLU, down(silu(gate(x)) up(x)) (Shazeer 2020), as Llama has it."""

import torch.nn.functional as F
from torch import Tensor, nn

from fp4repro.models.config import ModelConfig


class FeedForward(nn.Module):
    """Maps (batch, length, width) to the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shapes = config.linears("ffn")
        self.up = nn.Linear(*shapes["up"], bias=False)
        self.gate = nn.Linear(*shapes["gate"], bias=False) if "gate" in shapes else None
        self.down = nn.Linear(*shapes["down"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.relu(self.up(x)).square())
        return self.down(F.silu(self.gate(x)) * self.up(x))
