"""The language model: embedding, blocks x + mixer(norm(x)) as the pattern says, norm, head.

After Nemotron-H (NVIDIA 2025, arXiv 2504.03624), whose 8B and 12B models the NVFP4 paper trains.
The residual stream, norms and loss are in float32; the linears follow the caller's autocast.

Initial weights are normal of `init_std`; linears that write to the residual stream (out_proj, down,
o) have it divided by sqrt(2 x blocks). All come from one CPU generator in the order of the modules,
so that a seed gives the same bits on every device.
"""

import math
from collections import Counter

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp4repro.models.attention import Attention
from fp4repro.models.config import KINDS, ModelConfig
from fp4repro.models.ffn import FeedForward
from fp4repro.models.loss import mean_cross_entropy
from fp4repro.models.mamba import Mamba2

MIXERS = {"mamba": Mamba2, "ffn": FeedForward, "attention": Attention}
TO_RESIDUAL = ("out_proj", "down", "o")


class Block(nn.Module):
    """One residual block, (batch, length, width) to the same."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mixer = MIXERS[kind](config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class HybridModel(nn.Module):
    """A causal language model; `generator` draws its weights.

    On the device "meta" it has shapes alone, and needs no generator. With `recompute` set, a block's
    input is all that waits for the backward pass, which computes the rest again.
    """

    recompute = False

    def __init__(
        self,
        config: ModelConfig,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # the modules' own initialisation would draw from global state
            # Of an empty tensor, since initialising an embedding on meta imports torch's compiler.
            weight = torch.empty(config.vocabulary, config.width)
            self.embedding = nn.Embedding.from_pretrained(weight, freeze=False)
            self.blocks = nn.ModuleList(Block(config, KINDS[letter]) for letter in config.pattern)
            self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if torch.device(device).type != "meta":
            if generator is None:
                raise TypeError("HybridModel needs generator=torch.Generator() to draw its weights")
            self.to_empty(device=device)
            self._initialise(generator)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocabulary) of tokens (batch, length); with targets, mean loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self._recomputed(block, x) if self.recompute and torch.is_grad_enabled() else block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else mean_cross_entropy(logits, targets)

    @staticmethod
    def _recomputed(block: Block, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        std = self.config.init_std
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                to_residual = name.rpartition(".")[2] in TO_RESIDUAL
                scale = std / math.sqrt(2 * len(self.blocks)) if to_residual else std
                weight = torch.empty(module.weight.shape).normal_(0, scale, generator=generator)
                module.weight.copy_(weight)
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1)
            elif isinstance(module, Mamba2):
                module.initialise(generator)


def parameter_count(config: ModelConfig) -> dict[str, int]:
    """Parameters by kind: each linear as `ffn.up`, then embedding, head, norm, and mamba.other.

    Counted on the meta device; the sum of the values is the model's size.
    """
    model = HybridModel(config, device="meta")
    counts = Counter({part: getattr(model, part).weight.numel() for part in ("embedding", "head", "norm")})
    for block in model.blocks:
        counts["norm"] += block.norm.weight.numel()
        for name, parameter in block.mixer.named_parameters():
            linear = name.removesuffix(".weight")
            named = linear in config.linears(block.kind)
            counts[f"{block.kind}.{linear if named else 'other'}"] += parameter.numel()
    return dict(counts)
