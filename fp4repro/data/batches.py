"""Which tokens a step trains on, as a pure function of seed and step.

The text is cut into windows of `context` + 1 tokens (the last is only a target) that overlap by
one; each pass over the text shuffles them afresh and starts at another offset. The shuffle of a
pass comes from a Philox generator keyed by the seed and the pass, so a resumed run needs nothing
but its step, and every recipe sees the same batches.
"""

from functools import lru_cache

import numpy as np

# Keys of other uses of the same seed must differ from this one.
_KEY = 0x6261746368  # "batch"


class Batches:
    """Batches of `batch` sequences of `context` tokens from one row of tokens."""

    def __init__(self, tokens: np.ndarray, batch: int, context: int, seed: int) -> None:
        self.tokens = tokens
        self.batch = batch
        self.context = context
        self.seed = seed
        # One window less than fit, so that a pass may start anywhere in the first one.
        self.windows = max((len(tokens) - 1) // context - 1, 1)
        self._pass = lru_cache(maxsize=2)(self._shuffle)  # a batch touches two passes at most

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of a step, int64, (batch, context) each."""
        order = np.arange(step * self.batch, (step + 1) * self.batch)
        starts = [self._pass(n // self.windows)[n % self.windows] for n in order.tolist()]
        return windows(self.tokens, np.array(starts), self.context)

    def _shuffle(self, number: int) -> np.ndarray:
        """First tokens of the windows of one pass, in the order in which they are seen."""
        key = np.array([self.seed, _KEY], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, number]))
        room = len(self.tokens) - 1 - self.windows * self.context
        offset = generator.integers(min(room, self.context) + 1)
        return offset + self.context * generator.permutation(self.windows)


def evenly(tokens: np.ndarray, count: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` windows spread evenly over a text, the same ones always; int64, (count, context)."""
    starts = np.arange(count) * ((len(tokens) - 1) // count)
    return windows(tokens, starts, context)


def windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (the tokens one later) from each start; int64, (starts, context)."""
    both = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    return both[:, :-1], both[:, 1:]
