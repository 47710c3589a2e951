"""Which windows of which sources a step trains on, as a pure function of seed and step.

A run has phases (arXiv 2509.25149 has three, of 70, 20 and 10 % of its tokens), each with a mixture of
sources in thousandths of its sequences. A thousand sequences hold each source exactly as often as it should
be, in an order that a Philox generator draws from seed, phase and thousand. Sources are cut into windows as
in `batches`, and gone through in a new order (`permutation`) each time. So nothing is counted on the way:
a resume needs its step alone, and ranks, which share a step's sequences, see what one rank would.
"""

from functools import lru_cache

import numpy as np

from fp4repro.config import Phase, Training
from fp4repro.data.batches import Batches, windows
from fp4repro.data.permutation import Permutation
from fp4repro.data.shards import Shards

ROUND = 1000  # sequences within which a mixture is exact
# Keys of other uses of the same seed must differ from these.
_ORDER, _PASS = 0x6D6978, 0x70617373  # "mix", "pass"


def batches(train: np.ndarray | dict[str, Shards], training: Training, seed: int) -> "Batches | Mixture":
    """The batches of a run: of one row of tokens, or of sources as the run's phases mix them."""
    if isinstance(train, dict):
        return Mixture(train, training, seed)
    return Batches(train, training.batch, training.context, seed)


class Mixture:
    """Batches of a run in phases."""

    def __init__(self, sources: dict[str, Shards], training: Training, seed: int) -> None:
        self.sources = list(sources.values())
        self.training = training
        self.seed = seed
        self.windows = [max((len(row) - 1) // training.context - 1, 1) for row in self.sources]
        self.quotas = [self._quota(phase, list(sources)) for phase in training.phases]
        self.starts = [0, *(round(phase.until * training.steps) for phase in training.phases)]
        self._round = lru_cache(maxsize=4)(self._shuffled)
        self._pass = lru_cache(maxsize=4 * len(sources))(self._order_of_pass)
        # Sequences of each source that the phases before each one took.
        self.taken = [np.zeros(len(sources), dtype=np.int64)]
        for number in range(len(self.quotas)):
            steps = self.starts[number + 1] - self.starts[number]
            self.taken.append(self.taken[-1] + self._count(number, steps * training.batch))

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of a step, int64, (batch, context) each."""
        pieces = [
            windows(self.sources[source], np.array([self._start(source, number)]), self.training.context)
            for source, number in self.sequences(step)
        ]
        tokens, targets = zip(*pieces, strict=True)
        return np.concatenate(tokens), np.concatenate(targets)

    def sequences(self, step: int) -> list[tuple[int, int]]:
        """(source, how many of it came before in the run) of each sequence of a step."""
        phase = next(n for n, end in enumerate(self.starts[1:]) if step < end)
        first = (step - self.starts[phase]) * self.training.batch
        found = []
        for place in range(first, first + self.training.batch):
            number, within = divmod(place, ROUND)
            order, earlier = self._round(phase, number)
            source = order[within]
            before = self.taken[phase][source] + number * self.quotas[phase][source] + earlier[within]
            found.append((int(source), int(before)))
        return found

    def _quota(self, phase: Phase, names: list[str]) -> np.ndarray:
        return np.array([round(ROUND * phase.mixture.get(name, 0)) for name in names])

    def _shuffled(self, phase: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The sources of a thousand sequences, and how many of its own were before each."""
        generator = self._generator(_ORDER, phase, number)
        order = generator.permutation(np.repeat(np.arange(len(self.sources)), self.quotas[phase]))
        of_source = order[:, None] == np.arange(len(self.sources))
        return order, (of_source.cumsum(0) - 1)[np.arange(ROUND), order]

    def _count(self, phase: int, sequences: int) -> np.ndarray:
        """Sequences of each source among the first ones of a phase."""
        number, rest = divmod(sequences, ROUND)
        order = self._round(phase, number)[0][:rest]
        return number * self.quotas[phase] + np.bincount(order, minlength=len(self.sources))

    def _start(self, source: int, number: int) -> int:
        """First token of the window of a source that is its `number`-th in the run."""
        passes, place = divmod(number, self.windows[source])
        offset, order = self._pass(source, passes)
        return int(offset + self.training.context * order[np.array([place])][0])

    def _order_of_pass(self, source: int, number: int) -> tuple[int, Permutation]:
        generator = self._generator(_PASS, source, number)
        room = len(self.sources[source]) - 1 - self.windows[source] * self.training.context
        offset = int(generator.integers(min(room, self.training.context) + 1))
        return offset, Permutation(self.windows[source], generator)

    def _generator(self, use: int, which: int, number: int) -> np.random.Generator:
        key = np.array([self.seed, use], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, which, number]))
