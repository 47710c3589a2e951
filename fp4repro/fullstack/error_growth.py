"""How the error of NVFP4 products grows: with the terms of a sum, and along a chain of products.

Both operands rounded to nearest in blocks along the contraction, each with relative error e (9.0e-3 squared
for normal data), give a product with relative error sqrt(2) e = 0.134 whatever its length K: the absolute
error grows as sqrt(K). A chain y <- Q(W) Q(y) with fresh random W adds such an error at each link: 0.134
sqrt(L) after L of them. The paper (arXiv 2607.04422) calls this fast accumulation.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fp4repro.optim.newton_schulz import Gemm, bf16_gemm, nvfp4_gemm
from fp4repro.report import optimizer_tables as names

LENGTHS = (64, 256, 1024, 4096)
LINKS = 16
GEMMS: dict[str, Gemm] = {"nvfp4": nvfp4_gemm(), "bf16": bf16_gemm}


def accumulated(gemm: Gemm, length: int, side: int, generator: torch.Generator) -> tuple[float, float]:
    """Root mean square of the error of a (side, length) @ (length, side) product of N(0, 1) values, and the
    same relative to the product's."""
    a, b = (torch.randn(side, length, generator=generator) for _ in range(2))
    exact = a.double() @ b.double().T
    error = gemm(a, b).double() - exact
    return _rms(error), _rms(error) / _rms(exact)


def chained(gemm: Gemm, links: int, side: int, generator: torch.Generator) -> list[float]:
    """Relative error after each link of a chain of `links` products by fresh random (side, side) matrices,
    whose inputs are quantised anew."""
    exact = torch.randn(side, side, generator=generator).double()
    approximate = exact.float()
    errors = []
    for _ in range(links):
        w = torch.randn(side, side, generator=generator) * side**-0.5
        exact = exact @ w.double().T
        approximate = gemm(approximate, w).float()
        errors.append(_rms(approximate.double() - exact) / _rms(exact))
    return errors


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def figures(side: int, seed: int = 0) -> Iterator[tuple[str, str, float, str]]:
    """Setting, metric, value and note of each figure; `side` is that of the square matrices."""
    for name, gemm in GEMMS.items():
        generator = torch.Generator().manual_seed(seed)
        for length in LENGTHS:
            absolute, relative = accumulated(gemm, length, side, generator)
            where = f"{name}/sum-{length}"
            note = f"{side} x {length} by {length} x {side}, N(0, 1)"
            yield where, names.RMS_ERROR, absolute, note
            yield where, names.RELATIVE_ERROR, relative, note
        note = f"chain of {side} x {side} products by N(0, 1 / {side}) matrices"
        for link, error in enumerate(chained(gemm, LINKS, side, generator), 1):
            if link & (link - 1) == 0:  # 1, 2, 4, 8, 16
                yield f"{name}/chain-{link}", names.RELATIVE_ERROR, error, note
