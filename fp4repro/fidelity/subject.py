"""What is studied: a model with held-out text, either a finished run of ours or a pretrained one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fp4repro.config import TOKEN_MULTIPLE, CorpusBytes, Scale
from fp4repro.data.batches import evenly
from fp4repro.data.corpus import load_corpus
from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity.tensors import held_out_sequences, open_run
from fp4repro.layers import blocks_of
from fp4repro.models.loss import mean_cross_entropy
from fp4repro.pretrained import load_pretrained

HYBRID = "hybrid"  # name of our own model among the subjects
CONTEXT = 256  # tokens of a sequence of a pretrained model
HELD_OUT_BYTES = 400_000  # of the corpus, where no scale says how much


@dataclass(frozen=True)
class Subject:
    """A model in FP32, tokens and targets, int64 (sequences, context), and how the two give a loss."""

    name: str
    note: str
    model: nn.Module
    tokens: Tensor
    targets: Tensor
    loss_of: Callable[[Tensor, Tensor], Tensor]

    @property
    def blocks(self) -> dict[str, int]:
        """The linears of the blocks, which recipes quantise, by name -> the index of the block."""
        return blocks_of(self.model)

    @property
    def linears(self) -> dict[str, nn.Linear]:
        return {name: self.model.get_submodule(name) for name in self.blocks}

    def loss(self, autocast: bool = True) -> Tensor:
        """Mean cross entropy, nats a token; in BF16 autocast as in training, or in FP32 throughout."""
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return self.loss_of(self.tokens.to(device), self.targets.to(device))


def of_run(folder: Path, data_folder: Path, scale: Scale, tokens: int) -> Subject:
    """A finished run on the held-out part of its own token files."""
    model, data, name = open_run(folder, data_folder, scale)
    tokens, targets = held_out_sequences(data, scale, tokens)
    note = f"{name} at scale {scale.scale}, {tokens.numel()} held-out tokens"
    return Subject(HYBRID, note, model, tokens, targets, model)


def of_pretrained(name: str, scale: Scale | None, count: int, text: Path | None = None) -> Subject:
    """A pretrained model on `count` tokens of a text, or of the scale's (else the default corpus's)
    held-out text, cut by its own tokenizer."""
    if count < 1:
        raise Fp4ReproError(f"{count} tokens: the number must be 1 or more")
    words, source = _text(scale, text)
    loaded = load_pretrained(name)
    context = min(CONTEXT, _whole(count))
    sequences = _whole(count) // context
    stream = loaded.encode(words)
    if len(stream) <= sequences * context:
        raise Fp4ReproError(
            f"{source} has {len(stream)} tokens for {name}, and {sequences * context + 1} are needed: "
            "lower the number of tokens or name a longer text"
        )
    tokens, targets = (torch.from_numpy(part) for part in evenly(stream, sequences, context))

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return mean_cross_entropy(loaded.logits(tokens), targets)

    note = f"{loaded.note}; {tokens.numel()} tokens of {source}"
    return Subject(name, note, loaded.model, tokens, targets, loss_of)


def _whole(count: int) -> int:
    """A number of tokens that wgrad's blocks divide, a whole number of contexts beyond the first."""
    multiple = TOKEN_MULTIPLE if count <= CONTEXT else CONTEXT
    return -(-count // multiple) * multiple


def _text(scale: Scale | None, text: Path | None) -> tuple[str, str]:
    if text is not None:
        try:
            return text.read_text(encoding="utf-8"), text.name
        except (OSError, UnicodeDecodeError) as error:
            raise Fp4ReproError(f"{text} cannot be read as UTF-8 text: {error}") from None
    entry = scale.corpus if scale else "default"
    limit = scale.corpus_bytes if scale else CorpusBytes(None, HELD_OUT_BYTES)
    corpus = load_corpus(entry, limit)
    return "\n".join(document.text for document in corpus.validation), f"held-out text ({corpus.description})"
