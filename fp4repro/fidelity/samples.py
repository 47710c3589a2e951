"""Synthetic matrices of the format study, the same bits for the same seed.

gaussian         independent N(0, 1): the data of the literature's known answers
student-t        independent Student t with 3 degrees of freedom: heavy tails, as inside a block of
                 activations
outlier-channel  N(0, 1), each 128th column times 50: a few channels that dominate their blocks
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

SHAPE = (1024, 1024)
SEED = 0
DEGREES_OF_FREEDOM = 3
OUTLIER_EVERY, OUTLIER_FACTOR = 128, 50.0


def _gaussian(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.standard_normal(shape)


def _student_t(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.standard_t(DEGREES_OF_FREEDOM, shape)


def _outlier_channel(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    x = generator.standard_normal(shape)
    x[:, OUTLIER_EVERY // 2 :: OUTLIER_EVERY] *= OUTLIER_FACTOR
    return x


SAMPLES: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "gaussian": _gaussian,
    "student-t": _student_t,
    "outlier-channel": _outlier_channel,
}


def sample(name: str, shape: tuple[int, int] = SHAPE, seed: int = SEED) -> Tensor:
    """The matrix of that name, float32 (rows, columns)."""
    key = np.array([seed, list(SAMPLES).index(name)], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    return torch.from_numpy(SAMPLES[name](generator, shape).astype(np.float32))
