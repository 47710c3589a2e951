"""Newton-Schulz in NVFP4: what stays bounded and what does not (T-C1 to T-C6 of the specification)."""

import math

import numpy as np
import pytest
import torch

from fp4repro import NVFP4, quantize
from fp4repro.core.products import matmul
from fp4repro.errors import Fp4ReproError
from fp4repro.fullstack.newton_schulz_study import SPECTRA, cosine, measure, polar
from fp4repro.optim.newton_schulz import (
    CONTRACTIVE,
    CUBIC,
    GEMMS,
    MUON,
    ROOT,
    SCHEDULES,
    Trace,
    coefficients,
    newton_schulz,
)
from fp4repro.report import optimizer_tables as names

pytestmark = pytest.mark.usefixtures("eager")

# T-C1: largest iterate from (0, 1] in exact arithmetic, and the edge, as the specification has them
POLYNOMIALS = {
    MUON: (1.202, 1.264),
    ROOT[2048, 2048]: (1.225, 1.224),
    CONTRACTIVE: (1.0, 1.528),
    CUBIC: (1.0, 2.236),
}


def spectrum(name: str, side: int) -> torch.Tensor:
    number = list(SPECTRA).index(name)
    return SPECTRA[name][1](side, torch.Generator().manual_seed(number))


@pytest.mark.parametrize(
    ("triple", "expected"), POLYNOMIALS.items(), ids=["muon", "root", "contractive", "cubic"]
)
def test_edges_and_largest_iterates_of_the_polynomials(triple, expected):
    a, b, c = triple
    x = np.linspace(1e-4, 1, 200_001)
    largest = 0.0
    # ROOT's triple passes its own edge in the first step: from there iterates grow, if slowly.
    for _ in range(1 if triple == ROOT[2048, 2048] else 5):
        x = a * x + b * x**3 + c * x**5
        largest = max(largest, float(np.abs(x).max()))
    # |p(x)| = x: beyond the largest such x iterates grow. For the cubic p(x) = -x.
    roots = [
        r for level in (1, -1) for r in np.roots([c, b, a - level]) if abs(r.imag) < 1e-12 and r.real > 0
    ]
    edge = math.sqrt(max(r.real for r in roots))
    assert largest == pytest.approx(expected[0], abs=2e-3)
    assert edge == pytest.approx(expected[1], abs=2e-3)


# T-C2, the negative control; 97.9 for 512 x 512
@pytest.mark.parametrize("side", [256, pytest.param(512, marks=pytest.mark.slow)])
def test_muons_five_steps_blow_up_in_nvfp4_and_nowhere_else(side):
    m = spectrum("gaussian", side)
    steps = coefficients("muon5", m.shape)
    sigma = {name: _sigma(newton_schulz(m, steps, gemm)) for name, gemm in GEMMS.items()}
    assert sigma["nvfp4"] > 10
    assert sigma["fp32"] < 1.25
    assert sigma["bf16"] < 1.3


# T-C3; 1.30 / .971, 1.30 / .982, 1.08 / .953, 1.21 / .963
@pytest.mark.parametrize("name", SPECTRA)
def test_three_and_three_steps_stay_bounded_on_every_spectrum(name):
    found = measure(spectrum(name, 256), "muon3c3")
    assert found[names.SIGMA_MAX] <= 1.45
    assert found[names.COSINE_POLAR] >= 0.94
    assert found[names.COSINE_FP32] >= 0.97
    assert found[names.RMS_RATIO] == pytest.approx(1, abs=0.03)
    assert found[names.BLOWN_UP] == 0


def test_the_guard_holds_what_would_blow_up_and_counts():
    m = spectrum("gaussian", 256)
    trace = Trace(watch=True)
    guarded = newton_schulz(m, coefficients("muon5", m.shape), GEMMS["nvfp4"], guard=1.45, trace=trace)
    assert trace.guard_hits > 0
    assert _sigma(guarded) < 3
    assert len(trace.sigmas) == 5
    calm = Trace()
    newton_schulz(m, coefficients("muon3c3", m.shape), GEMMS["nvfp4"], guard=1.45, trace=calm)
    assert calm.guard_hits == 0


# T-C4
@pytest.mark.parametrize("gemm", GEMMS)
def test_scale_does_not_matter(gemm):
    m = spectrum("gaussian", 64)
    steps = coefficients("muon3c3", m.shape)
    base = newton_schulz(m, steps, GEMMS[gemm])
    for factor in (2.0**-60, 2.0**60):  # a power of two changes no bit
        assert torch.equal(newton_schulz(factor * m, steps, GEMMS[gemm]), base)
    assert cosine(newton_schulz(3e-5 * m, steps, GEMMS[gemm]), base) > 0.99


# T-C5
@pytest.mark.parametrize("gemm", GEMMS)
def test_the_transpose_of_the_result_is_the_result_of_the_transpose(gemm):
    m = spectrum("gaussian-wide", 64)
    steps = coefficients("muon3c3", m.shape)
    assert torch.equal(newton_schulz(m.T, steps, GEMMS[gemm]), newton_schulz(m, steps, GEMMS[gemm]).T)


# T-C6
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_zero_and_rank_one_are_harmless(schedule):
    zero = newton_schulz(torch.zeros(64, 96), coefficients(schedule, (64, 96)), GEMMS["nvfp4"], guard=1.45)
    assert not zero.any()
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(n, generator=generator) for n in (64, 96))
    m = torch.outer(u, v)
    got = newton_schulz(m, coefficients(schedule, m.shape), GEMMS["nvfp4"], guard=1.45)
    assert got.isfinite().all()
    if schedule != "polar-express5":  # along its one direction the result is near 1, noise or not
        assert float((got * m).sum() / m.norm()) == pytest.approx(1, abs=0.35)


def test_sides_that_fill_no_block_are_padded_with_nothing():
    m = torch.randn(50, 83, generator=torch.Generator().manual_seed(0))
    steps = coefficients("cubic12", m.shape)
    got = newton_schulz(m, steps)
    assert got.shape == m.shape
    assert cosine(newton_schulz(m, steps, GEMMS["nvfp4"]), got) > 0.95
    exact = newton_schulz(m, ((3 / 2, -1 / 2, 0.0),) * 40)
    torch.testing.assert_close(exact, polar(m), rtol=0, atol=1e-4)


def test_the_nvfp4_product_is_the_cores():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(32, 64, generator=generator), torch.randn(48, 64, generator=generator)
    expected = matmul(quantize(a, NVFP4), quantize(b, NVFP4), torch.bfloat16)
    assert torch.equal(GEMMS["nvfp4"](a, b), expected)
    apart = (expected.float() - a @ b.T).norm() / (a @ b.T).norm()
    assert apart == pytest.approx(0.134, abs=0.01)


def test_schedules_by_shape_and_name():
    assert coefficients("root5", (8192, 2048)) == (ROOT[2048, 8192],) * 5
    assert coefficients("root5", (64, 64)) == (MUON,) * 5
    assert [len(coefficients(s, (64, 64))) for s in SCHEDULES] == [5, 5, 5, 6, 6, 6, 8, 12]
    with pytest.raises(Fp4ReproError, match="no Newton-Schulz schedule is named 'muon6'; known: muon5"):
        coefficients("muon6", (64, 64))
    with pytest.raises(Fp4ReproError, match="takes matrices"):
        newton_schulz(torch.zeros(4), (MUON,))


def _sigma(x: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(x, 2))
