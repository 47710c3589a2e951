"""Newton-Schulz: an odd polynomial iterated towards the orthogonal factor of a matrix, on any product.

    X = M / |M|_F;   A = X X^T;   B = b A + c A A;   X = a X + B X        (wide X; a tall M is transposed)

Muon's five equal steps leave 5 % between the largest iterate (1.20) and the edge of instability (1.26), less
than the noise of one NVFP4 product: they blow up on flat spectra. The contractive triple (15/8, -5/4, 3/8)
has its edge at 1.53; three ordinary and three contractive steps are the default. Sources: Muon (Jordan
2024), ROOT (arXiv 2511.20626; triples by shape), Polar Express (arXiv 2505.16932).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4repro.core.formats import NVFP4, BlockFormat
from fp4repro.core.products import product
from fp4repro.core.quantize import quantize_operand
from fp4repro.errors import Fp4ReproError

Triple = tuple[float, float, float]
Gemm = Callable[[Tensor, Tensor], Tensor]  # a (M, K), b (N, K) -> a @ b.T (M, N)

MUON: Triple = (3.4445, -4.7750, 2.0315)
CONTRACTIVE: Triple = (15 / 8, -5 / 4, 3 / 8)
CUBIC: Triple = (3 / 2, -1 / 2, 0.0)
ROOT: dict[tuple[int, int], Triple] = {  # (smaller side, larger side)
    (2048, 2048): (3.4916, -4.8224, 2.1095),
    (2048, 3072): (3.4509, -4.5790, 1.9325),
    (2048, 8192): (2.9794, -3.6674, 1.6207),
    (2048, 16384): (3.1943, -3.8221, 1.5322),
}
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
)
_MARGIN = 1.01  # of Polar Express, for rounding

SCHEDULES = (
    "muon5",
    "root5",
    "polar-express5",
    "muon3c3",
    "root3c3",
    "muon2c4",
    "contractive8",
    "cubic12",
)
GRAIN = 16  # sides are filled with zeros to a multiple of it, which changes no singular vector
POWER_ITERATIONS = 3


def root_triple(shape: tuple[int, ...]) -> Triple:
    """ROOT's published triple of that shape; Muon's, as ROOT does, for the others."""
    return ROOT.get((min(shape), max(shape)), MUON)


def coefficients(schedule: str, shape: tuple[int, ...]) -> tuple[Triple, ...]:
    """The triples of the steps, in their order."""
    steps = {
        "muon5": (MUON,) * 5,
        "root5": (root_triple(shape),) * 5,
        "polar-express5": _safe(_POLAR_EXPRESS),
        "muon3c3": (MUON,) * 3 + (CONTRACTIVE,) * 3,
        "root3c3": (root_triple(shape),) * 3 + (CONTRACTIVE,) * 3,
        "muon2c4": (MUON,) * 2 + (CONTRACTIVE,) * 4,
        "contractive8": (CONTRACTIVE,) * 8,
        "cubic12": (CUBIC,) * 12,
    }
    if schedule not in steps:
        raise Fp4ReproError(f"no Newton-Schulz schedule is named {schedule!r}; known: {', '.join(SCHEDULES)}")
    return steps[schedule]


def _safe(steps: tuple[Triple, ...]) -> tuple[Triple, ...]:
    shrunk = tuple((a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5) for a, b, c in steps[:-1])
    return (*shrunk, steps[-1])


def fp32_gemm(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float().T


def bf16_gemm(a: Tensor, b: Tensor) -> Tensor:
    """BF16 operands, FP32 sums, BF16 output."""
    return product(a.bfloat16(), b.bfloat16().T, 1.0, torch.bfloat16)


def nvfp4_gemm(fmt: BlockFormat = NVFP4) -> Gemm:
    """Both operands rounded to nearest in blocks along the contraction, FP32 sums, BF16 output."""

    def gemm(a: Tensor, b: Tensor) -> Tensor:
        left, left_scale = quantize_operand(a, fmt, nonfinite="poison")
        right, right_scale = (left, left_scale) if b is a else quantize_operand(b, fmt, nonfinite="poison")
        return product(left, right.T, left_scale * right_scale, torch.bfloat16)

    return gemm


GEMMS: dict[str, Gemm] = {"fp32": fp32_gemm, "bf16": bf16_gemm, "nvfp4": nvfp4_gemm()}


@dataclass
class Trace:
    """What a guarded or watched run saw; `sigmas` are filled where asked for."""

    guard_hits: int = 0
    watch: bool = False
    sigmas: list[float] = field(default_factory=list)  # largest singular value after each step


def newton_schulz(
    m: Tensor,
    steps: tuple[Triple, ...],
    gemm: Gemm = fp32_gemm,
    guard: float = 0.0,
    last: Gemm | None = None,
    trace: Trace | None = None,
) -> Tensor:
    """float32 (rows, columns) near the orthogonal polar factor of `m`; zeros for a zero matrix.

    guard  an iterate whose largest singular value, by a few power iterations, is above it is divided by it
           (0: never); `trace` counts how often
    last   the product of the last step, where it is another
    """
    if m.ndim != 2:
        raise Fp4ReproError(f"Newton-Schulz takes matrices, got shape {tuple(m.shape)}")
    trace = trace if trace is not None else Trace()
    carrier = torch.float32 if gemm is fp32_gemm else torch.bfloat16
    tall = m.shape[0] > m.shape[1]
    x = (m.T if tall else m).float()
    rows, columns = x.shape
    x = pad(x, (0, -columns % GRAIN, 0, -rows % GRAIN))
    amax = x.abs().amax()  # divided out first, so that no square overflows or vanishes
    x = x / torch.where(amax > 0, amax, 1.0)
    norm = x.norm()
    x = (x / torch.where(norm > 0, norm, 1.0)).to(carrier).contiguous()
    for number, (a, b, c) in enumerate(steps):
        used = last if last is not None and number == len(steps) - 1 else gemm
        gram = used(x, x)  # (rows, rows)
        if guard:
            x, gram = _guarded(x, gram, guard, trace)
        square = used(gram, gram) if c else torch.zeros_like(gram)
        inner = (b * gram.float() + c * square.float()).to(carrier)
        x = (a * x.float() + used(inner, x.T.contiguous()).float()).to(carrier)
        if trace.watch:
            trace.sigmas.append(float(torch.linalg.matrix_norm(x.float(), 2)))
    x = x[:rows, :columns].float()
    return x.T.contiguous() if tall else x


def _guarded(x: Tensor, gram: Tensor, guard: float, trace: Trace) -> tuple[Tensor, Tensor]:
    """X and X X^T, divided where the estimate of X's largest singular value is above `guard`."""
    a = gram.float()
    v = a[a.diagonal().argmax()]  # the row with the most of the largest direction, and no random state
    for _ in range(POWER_ITERATIONS):
        v = a @ (v / v.norm().clamp_min(1e-30))
    sigma = v.norm().sqrt()
    if not sigma > guard:
        return x, gram
    trace.guard_hits += 1
    return (x.float() / sigma).to(x.dtype), (a / sigma**2).to(gram.dtype)
