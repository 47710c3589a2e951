"""Random bits as a function of a key and an element's index, from no state at all.

A `RandomKey` names a stream (seed, step, layer, role, and more where needed); `random_bits` hashes
each element's index under the key's two words. Only 32-bit integer products, sums, shifts and
exclusive-ors occur, so the bits are the same on every device, compiled or not, on one thread or
many, and a run that is resumed or recomputed draws them again. Two words enter at two depths of the
hash, since with a single additive word any two streams would be shifted copies of each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4repro.errors import Fp4ReproError

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix(state: int) -> int:
    """One output of the splitmix64 generator (Steele, Lea, Flood 2014)."""
    z = (state + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True)
class RandomKey:
    """Names one stream of random bits: equal keys give equal bits, others independent ones."""

    seed: int = 0
    step: int = 0
    layer: int = 0
    role: int = 0
    microbatch: int = 0
    rank: int = 0
    salt: int = 0

    def words(self) -> tuple[int, int]:
        """The key as two signed 32-bit words."""
        state = 0
        parts = self.seed, self.step, self.layer, self.role, self.microbatch, self.rank, self.salt
        for part in parts:  # not `astuple`, which copies deeply
            state = _splitmix(state ^ (part & _MASK))
        return _signed(state & 0xFFFFFFFF), _signed(state >> 32)

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The words as int32 (2,), so that a compiled function takes a new key without recompiling."""
        return torch.tensor(self.words(), dtype=torch.int32, device=device)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def hash_index(index: Tensor, words: Tensor) -> Tensor:
    """int32 hash of int32 `index` under int32 `words` (2,); every output bit depends on every input bit."""
    h = index * -1640531527 ^ words[0]  # 2**32 / golden ratio
    h = (h ^ (h >> 16 & 0xFFFF)) * 0x7FEB352D  # multipliers of Wellons' lowbias32
    h = h + words[1]
    h = (h ^ (h >> 15 & 0x1FFFF)) * -2073254261  # 0x846CA68B
    return h ^ (h >> 16 & 0xFFFF)


_FIELDS = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}


def words_needed(count: int, bits: int) -> int:
    """How many 32-bit words hold `count` fields of `bits` bits."""
    if bits not in _FIELDS:
        raise Fp4ReproError(f"random bits an element must be 8, 16 or 32, not {bits}")
    return -(-count * bits // 32)


def fields_of(words: Tensor, count: int, bits: int) -> Tensor:
    """Cut words into unsigned fields of 8, 16 or 32 bits, lowest first; (count,). Hardware likewise
    rounds four elements with the four bytes of one word."""
    return words.view(_FIELDS[bits])[:count]


def random_bits(count: int, key: RandomKey, bits: int = 8) -> Tensor:
    """`bits` random bits for each of `count` elements: unsigned integers (count,)."""
    index = torch.arange(words_needed(count, bits), dtype=torch.int32)
    return fields_of(hash_index(index, key.tensor()), count, bits)
