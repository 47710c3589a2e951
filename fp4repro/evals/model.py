"""What is evaluated: a trained run of ours, or a Hugging Face model, behind one way of asking for logits.

`logits(prefix, tails)` scores several continuations of one text. A Hugging Face model reads the prefix
once and keeps its cache for all tails; ours, whose Mamba state cannot be branched, reads prefix and
tails as one batch. A question is one batch, so a quantised tensor, and with it every score, depends on
that question alone and not on which others are asked.

The output head, which all recipes keep in high precision, multiplies in FP32: in BF16 the logits of two
answers would often be equal, and the first letter would win.
"""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fp4repro.config import Scale
from fp4repro.data.tokenizer import end_of_text, load_tokenizer
from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity.tensors import open_run
from fp4repro.pretrained import load_pretrained


class _Head(nn.Linear):
    """An output head whose product is in FP32 under any autocast; (..., in) -> (..., vocabulary)."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return linear(x.float(), self.weight.float(), self.bias)


class EvalModel:
    """A causal model and its tokenizer.

    note        what is to be said of a pretrained model; empty for ours
    context     tokens that it reads at most; a longer text loses its beginning
    begin, end  the tokens that stand before a text without any context, and after a text
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        tokenizer: Any,
        *,
        begin: int,
        end: int,
        context: int,
        device: torch.device,
        note: str = "",
    ) -> None:
        self.note = note
        self.name, self.module, self.tokenizer = name, module.to(device).eval(), tokenizer
        self.begin, self.end, self.context, self.device = begin, end, context, device
        own = hasattr(module, "get_output_embeddings")
        head = module.get_output_embeddings() if own else module.head
        if type(head) is nn.Linear:
            head.__class__ = _Head
        accepts = inspect.signature(module.forward).parameters
        # transformers is renaming the argument.
        self.cache = next((name for name in ("cache", "past_key_values") if name in accepts), None)
        self.caches = self.cache is not None and "logits_to_keep" in accepts

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, none added."""
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return list(getattr(encoded, "ids", encoded))

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))

    @torch.no_grad()
    def logits(self, prefix: Sequence[int], tails: Sequence[Sequence[int]]) -> list[Tensor]:
        """FP32 (1 + len(tail), vocabulary) of each tail: after the prefix, then after each of its tokens.

        The prefix has at least one token, and keeps one however long a tail is.
        """
        longest = max(map(len, tails))
        room = max(self.context - longest, 1)
        prefix = list(prefix[-room:])
        if self.caches:
            return self._branch(prefix, tails, longest)
        # Tails are padded at their end, where a causal model's earlier tokens do not see it.
        rows = [[*prefix, *tail, *[self.end] * (longest - len(tail))] for tail in tails]
        out = _logits(self._run(rows)).float()
        start = len(prefix) - 1
        return [row[start : start + 1 + len(tail)] for row, tail in zip(out, tails, strict=True)]

    def _branch(self, prefix: list[int], tails: Sequence[Sequence[int]], longest: int) -> list[Tensor]:
        """One pass over the prefix, its cache repeated for one pass over all tails."""
        first = self._run([prefix], use_cache=longest > 0, logits_to_keep=1)
        after_prefix = _logits(first)[0].float()
        if longest == 0:
            return [after_prefix] * len(tails)
        cache = first[self.cache]
        cache.batch_repeat_interleave(len(tails))
        rows = [[*tail, *[self.end] * (longest - len(tail))] for tail in tails]
        out = _logits(self._run(rows, use_cache=True, **{self.cache: cache})).float()
        return [torch.cat([after_prefix, row[: len(tail)]]) for row, tail in zip(out, tails, strict=True)]

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """At most `count` tokens after a prompt, the likeliest each time."""
        tokens = list(prompt[-max(self.context - count, 1) :])
        given, kept = tokens, {}
        for _ in range(count):
            if self.caches:
                out = self._run([given], use_cache=True, logits_to_keep=1, **kept)
                kept = {self.cache: out[self.cache]}
            else:
                out = self._run([tokens[-self.context :]])
            token = int(_logits(out)[0, -1].argmax())
            yield token
            given = [token]
            tokens = [*tokens, token]

    def _run(self, rows: list[list[int]], **options: Any) -> Any:
        """The module's own answer to rows of tokens of one length."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.module(torch.tensor(rows, dtype=torch.int64, device=self.device), **options)


def _logits(answer: Any) -> Tensor:
    """(rows, positions, vocabulary): ours are all there is, transformers' have a name."""
    return getattr(answer, "logits", answer)


def load_run(folder: Path, data: Path, scale: Scale, device: torch.device) -> EvalModel:
    """A finished run of ours, by its setting (`nvfp4/seed-0`); `data` holds its tokenizer.

    It reads at most as many tokens as it was trained on at once.
    """
    module, _, name = open_run(folder, data, scale)
    tokenizer = load_tokenizer(data / "tokenizer.json")
    end = end_of_text(tokenizer)
    context = scale.training.context
    return EvalModel(name, module, tokenizer, begin=end, end=end, context=context, device=device)


def load_model(name: str, device: torch.device) -> EvalModel:
    """A pretrained model by a name or path that `fp4repro.pretrained` knows, weights in FP32."""
    found = load_pretrained(name)
    return wrap(name, found.model, found.tokenizer, device, found.note)


def wrap(name: str, module: nn.Module, tokenizer: Any, device: torch.device, note: str = "") -> EvalModel:
    """A Hugging Face model that is loaded already; one without a token for the end of a text is refused."""
    begin, end = (_special(tokenizer, module.config, which) for which in ("bos_token_id", "eos_token_id"))
    if end is None:
        raise Fp4ReproError(
            f"{name} has no eos_token_id, in its tokenizer or its config, and texts have to end: set it there"
        )
    begin = end if begin is None else begin
    context = getattr(module.config, "max_position_embeddings", None) or 2048
    return EvalModel(name, module, tokenizer, begin=begin, end=end, context=context, device=device, note=note)


def _special(tokenizer: Any, config: Any, which: str) -> int | None:
    """The tokenizer's token of that use, else the config's, the first where those are several."""
    for owner in (tokenizer, config):
        token = getattr(owner, which, None)
        if token is not None:
            return token[0] if isinstance(token, list) else token
    return None
