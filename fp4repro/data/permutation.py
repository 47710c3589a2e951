"""A shuffle of n things whose order is computed place by place, with no list of n numbers in memory.

A Feistel network over the least 4^k >= n (Luby and Rackoff 1988): halves (l, r) become (r, l xor f(r)),
which can be undone whatever f is, so that it is a bijection. A result that is not below n goes through
again until one is (cycle walking; Black and Rogaway 2002), four times on average at most.
"""

import numpy as np

_ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


class Permutation:
    """Of range(n); the generator gives its keys."""

    def __init__(self, n: int, generator: np.random.Generator) -> None:
        self.n = n
        self.half = np.uint64(max(((n - 1).bit_length() + 1) // 2, 1))  # bits of a half
        self.keys = generator.integers(2**64, size=_ROUNDS, dtype=np.uint64)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """What stands at these places; int64, their shape."""
        found = self._through(np.asarray(places, dtype=np.uint64))
        while (outside := found >= self.n).any():
            found[outside] = self._through(found[outside])
        return found.astype(np.int64)

    def _through(self, places: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self.half) - np.uint64(1)
        left, right = places >> self.half, places & mask
        for key in self.keys:
            left, right = right, left ^ (_hash(right ^ key) & mask)
        return left << self.half | right


def _hash(x: np.ndarray) -> np.ndarray:
    for shift, factor in zip((30, 27), _MIX, strict=True):
        x = (x ^ (x >> np.uint64(shift))) * factor
    return x ^ (x >> np.uint64(31))
