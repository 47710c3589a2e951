"""Newton-Schulz schedules on four spectra: where NVFP4 lets singular values run away, and where it does not.

The cosine to the exact polar factor says how good the direction is, that to the same schedule in FP32 what
NVFP4 costs, and the ratio of root mean squares whether the update only became larger: a hidden change of
the learning rate. A run counts as blown up where a singular value ends above 10.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp4repro.optim.newton_schulz import GEMMS, MUON, Trace, coefficients, newton_schulz, root_triple
from fp4repro.report import optimizer_tables as names

BLOWN_UP = 10.0
GUARD = 1.45

# name -> schedule, product, guard
METHODS: dict[str, tuple[str, str, float]] = {
    "muon5-fp32": ("muon5", "fp32", 0.0),
    "muon5-bf16": ("muon5", "bf16", 0.0),
    "muon5": ("muon5", "nvfp4", 0.0),
    "muon5-guarded": ("muon5", "nvfp4", GUARD),
    "root5": ("root5", "nvfp4", 0.0),
    "polar-express5": ("polar-express5", "nvfp4", 0.0),
    "muon3c3": ("muon3c3", "nvfp4", 0.0),
    "muon3c3-guarded": ("muon3c3", "nvfp4", GUARD),
    "muon2c4": ("muon2c4", "nvfp4", 0.0),
    "contractive8": ("contractive8", "nvfp4", 0.0),
    "cubic12": ("cubic12", "nvfp4", 0.0),
}


def _normal(side: int, draw: torch.Generator) -> Tensor:
    return torch.randn(side, side, generator=draw)


def _wide(side: int, draw: torch.Generator) -> Tensor:
    return torch.randn(side, 4 * side, generator=draw)


def _decaying(side: int, draw: torch.Generator) -> Tensor:
    u, v = (torch.linalg.qr(torch.randn(side, side, generator=draw))[0] for _ in range(2))
    return u / torch.arange(1, side + 1) @ v.T


def _outliers(side: int, draw: torch.Generator) -> Tensor:
    x = torch.randn(side, side, generator=draw)
    return torch.where(torch.rand(side, side, generator=draw) < 1e-3, 100 * x, x)


SPECTRA: dict[str, tuple[str, Callable[[int, torch.Generator], Tensor]]] = {
    "gaussian": ("square N(0, 1)", _normal),
    "gaussian-wide": ("N(0, 1), four times as wide as high", _wide),
    "decaying": ("square, singular values 1 / i", _decaying),
    "outliers": ("square N(0, 1), a thousandth of it times 100", _outliers),
}


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-30))


def polar(m: Tensor) -> Tensor:
    """The exact orthogonal factor, in float64."""
    u, _, v = torch.linalg.svd(m.double(), full_matrices=False)
    return (u @ v).float()


def measure(m: Tensor, method: str, exact: Tensor | None = None) -> dict[str, float]:
    """The metrics of one method on one matrix; `exact` is its polar factor where that is known already."""
    schedule, gemm, guard = METHODS[method]
    steps, trace = coefficients(schedule, m.shape), Trace()
    got = newton_schulz(m, steps, GEMMS[gemm], guard, trace=trace)
    fp32 = newton_schulz(m, steps)
    sigma = float(torch.linalg.matrix_norm(got, 2)) if bool(got.isfinite().all()) else math.inf
    return {
        names.SIGMA_MAX: sigma,
        names.COSINE_POLAR: cosine(got, polar(m) if exact is None else exact),
        names.COSINE_FP32: cosine(got, fp32),
        names.RMS_RATIO: float(got.norm() / fp32.norm()),
        names.GUARD_HITS: trace.guard_hits,
        names.BLOWN_UP: int(not sigma <= BLOWN_UP),
    }


def figures(side: int, seed: int = 0) -> Iterator[tuple[str, str, float, str]]:
    """Setting, metric, value and note of each figure."""
    for number, (spectrum, (what, make)) in enumerate(SPECTRA.items()):
        m = make(side, torch.Generator().manual_seed(seed + number))
        exact = polar(m)
        note = f"{m.shape[0]} x {m.shape[1]}, {what}"
        for method in METHODS:
            fallback = method.startswith("root") and root_triple(m.shape) == MUON
            added = "; no triple is published for this shape: Muon's" if fallback else ""
            for metric, value in measure(m, method, exact).items():
                yield f"{method}/{spectrum}", metric, value, note + added
