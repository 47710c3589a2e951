"""Inputs that tell roundings apart: ties, subnormals, extremes, and families of random blocks.

`NAMED` are small matrices, each made for one fault that Gaussian data cannot show; `FAMILIES` draw
any number of rows of 64. Everything is float32, finite, and follows from the seed.
"""

import ml_dtypes
import numpy as np
import oracle

F32 = np.float32
NEIGHBOURS = 3  # a point, the float32 below it and the one above


def with_neighbours(points: np.ndarray) -> np.ndarray:
    points = np.asarray(points, F32)
    return np.stack([points, np.nextafter(points, F32(0)), np.nextafter(points, F32(np.inf))])


def midpoints(kind) -> np.ndarray:
    """Exact in float32 for the types used here."""
    grid = oracle.grid(kind)
    return ((grid[1:] + grid[:-1]) / 2).astype(F32)


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(F32)


def normal(seed: int, shape=(32, 64), scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(F32)


def ties() -> np.ndarray:
    """Each block's amax is 6 times a power of two, one is 2688: scales are powers of two, so that
    the midpoints of E2M1 and their neighbours reach the rounder as they are."""
    rng = np.random.default_rng(1)
    pool = with_neighbours(midpoints(oracle.E2M1)).ravel()
    x = rng.choice(pool, (128, 16)) * rng.choice([-1, 1], (128, 16))
    x[:, 0] = 6
    x *= np.exp2(rng.integers(-4, 8, (128, 1)))
    x = x.reshape(32, 64)
    x[0, :16] = 0
    x[0, 0] = 2688
    return x.astype(F32)


def scale_ties(amax: float = 2688.0) -> np.ndarray:
    """Block amaxes that map to the midpoints of E4M3 and float32 neighbours; 2688 makes the tensor
    scale 1. The last rows are drawn around the midpoints more widely."""
    points = midpoints(oracle.E4M3).astype(np.float64) * 6 * (amax / 2688)
    tops = with_neighbours(points).ravel()
    rng = np.random.default_rng(2)
    near = rng.choice(points.astype(F32), 8 * len(points))
    near = (near.view(np.int32) + rng.integers(-6, 7, near.shape, dtype=np.int32)).view(F32)
    tops = np.concatenate([tops, near])
    tops = tops[tops < amax][: len(tops) // 64 * 64]
    x = rng.uniform(-1, 1, (len(tops), 16)).astype(F32) * tops[:, None]
    x[:, 3] = -tops
    x[0, :] = amax
    return x.reshape(-1, 64)


def scale_underflow() -> np.ndarray:
    x = normal(3)
    x[1::2] *= F32(3e-7)
    x[0, 0] = 100
    return x


def zero_block() -> np.ndarray:
    x = normal(4)
    x[5, 16:32] = x[16:32, 48:] = 0
    x[7, 0] = -1e-9  # code 8 in the reference, where an input of -0.0 gets code 0
    x[31, 63] = -0.0
    return x


def huge() -> np.ndarray:
    return np.clip(normal(5, scale=1e38), -3e38, 3e38)


def flt_max() -> np.ndarray:
    x = normal(6, scale=1e37)
    x[3, 3], x[20, 50] = oracle.FLT_MAX, -oracle.FLT_MAX
    return x


def mixed_subnormal() -> np.ndarray:
    x = normal(7)
    x[::2] *= F32(1e-39)
    return x


def outlier() -> np.ndarray:
    x = normal(8)
    x[:, 11] *= 300
    return bf16(x)


NAMED = {
    "gauss": normal(0),
    "gauss_bf16": bf16(normal(9)),
    "heavy_bf16": bf16(np.random.default_rng(10).standard_t(2, (32, 64))),
    "outlier": outlier(),
    "ties": ties(),
    "scaleties": scale_ties(),
    "scaleties_scaled": scale_ties(3.7),
    "scaleunderflow": scale_underflow(),
    "zeros": np.zeros((32, 64), F32),
    "zeroblock": zero_block(),
    "subnormal": normal(11, scale=1e-40),
    "mixedsubnormal": mixed_subnormal(),
    "huge": huge(),
    "fltmax": flt_max(),
    "const": np.full((32, 64), 3.7, F32),
    "alternating": np.full((32, 64), 0.3, F32) * np.where(np.arange(64) % 2, -1, 1).astype(F32),
}


def wide(rng, rows):
    return rng.standard_normal((rows, 64)) * np.exp2(rng.uniform(-24, 24, (rows, 64)))


def wide_blocks(rng, rows):
    scale = np.exp2(rng.uniform(-12, 12, (rows, 4)))
    return rng.standard_normal((rows, 64)) * np.repeat(scale, 16, 1)


def tied(rng, rows):
    x = rng.integers(-24, 25, (rows, 64)) / 4
    x[:, ::16] = 6
    x[0, 0] = 2688
    return x


def tiny(rng, rows):
    return rng.standard_normal((rows, 64)) * 1e-33


def enormous(rng, rows):
    return np.clip(rng.standard_normal((rows, 64)) * 6e37, -3.4e38, 3.4e38)


def denormal(rng, rows):
    return rng.standard_normal((rows, 64)) * np.exp2(rng.uniform(-149, -120, (rows, 1)))


def zero_blocks(rng, rows):
    keep = np.repeat(rng.random((rows, 4)) < 0.5, 16, 1)
    return np.where(keep, rng.standard_normal((rows, 64)), 0)


def negative_maximum(rng, rows):
    x = rng.random((rows, 64))
    x[:, 5::16] = -rng.uniform(10, 400, (rows, 4))
    return x


FAMILIES = {
    f.__name__: f
    for f in (
        wide,
        wide_blocks,
        tied,
        tiny,
        enormous,
        denormal,
        zero_blocks,
        negative_maximum,
    )
}


def family(name: str, blocks: int, seed: int = 0) -> np.ndarray:
    """Rows of four blocks of one family, float32, without -0.0."""
    rng = np.random.default_rng([seed, sorted(FAMILIES).index(name)])
    return FAMILIES[name](rng, blocks // 4).astype(F32) + F32(0)
