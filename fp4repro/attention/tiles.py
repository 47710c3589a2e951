"""How attention is cut up: a few heads at a time, and of these a tile of query rows with all their keys.

A tile's rows are whole, so that softmax needs no running maximum, and what exists at once grows with
the length, not with its square. Positions are padded to whole blocks; a padded key is masked, and a
padded query has no gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

# Scores that are worked on at once: 1.5 MiB in float32, of which two are held. With fewer, calls cost more
# than the processor's cache saves: with half of them 512 tokens take 1.3 times the time on two threads.
SCORES = 3 * 2**17


@dataclass(frozen=True)
class Shape:
    """heads: batch x key heads; group: query heads of each; queries, keys: real positions."""

    heads: int
    group: int
    queries: int
    keys: int
    causal: bool
    multiple: int  # of padded positions

    def padded(self, positions: int) -> int:
        return -(-positions // self.multiple) * self.multiple

    def chunks(self, rows: int) -> Iterator[slice]:
        """Heads that are worked on together."""
        count = max(1, SCORES // (self.group * min(rows, self.queries) * self.keys))
        for first in range(0, self.heads, count):
            yield slice(first, min(first + count, self.heads))

    def tiles(self, rows: int) -> Iterator[tuple[slice, int]]:
        """Query rows, and how many keys they see: under a causal mask none that lies after them all."""
        queries, keys = self.padded(self.queries), self.padded(self.keys)
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            yield slice(first, last), min(last, keys) if self.causal else keys

    def mask(self, scores: Tensor, rows: slice) -> Tensor:
        """scores (heads, group, rows, keys) in place: -inf where a query must not look."""
        seen = scores.shape[-1]
        if self.causal:
            side = rows.stop - rows.start
            scores[..., seen - side :].masked_fill_(_later(side, scores.device), float("-inf"))
        elif seen > self.keys:
            scores[..., self.keys :] = float("-inf")
        return scores


@cache
def _later(side: int, device: torch.device) -> Tensor:
    """(queries, keys): whether the key comes after the query."""
    return torch.ones(side, side, dtype=torch.bool, device=device).triu_(1)


def pad_positions(x: Tensor, length: int) -> Tensor:
    """x (..., positions, head_dim) with zero rows up to `length`, contiguous."""
    missing = length - x.shape[-2]
    return (pad(x, (0, 0, 0, missing)) if missing else x).contiguous()
