"""Whether a backend works, found by running it.

An installed library may say that NVFP4 is available and then raise, return zeros, or return NaN
(public reports for consumer Blackwell). So a backend is usable when one small forward and backward of
a linear under the whole recipe gives the emulation's results, within what is stated here.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp4repro.backends import emulation
from fp4repro.backends.backend import Backend, Results
from fp4repro.errors import Fp4ReproError

NAMES = ("y", "dx", "dw")

# All multiples of 128, as fused kernels want; faults were seen where K is a multiple of 128.
TOKENS, FEATURES_IN, FEATURES_OUT = 256, 256, 384

# Largest distance, relative in the Frobenius norm, of results that come from the same operand bits:
# only the order of sums and the rounding to BF16 (2**-9 at most, twice) are left to differ.
SAME_BITS = 0.01
# Results rounded with other random bits than the emulation's: two gradients each 0.17 away from the
# exact one in directions of their own have a cosine of 0.97.
COSINE = 0.95
# Smallest distance from the product of unquantised operands; NVFP4's is 0.13 to 0.17 here.
QUANTISED = 0.05


@dataclass(frozen=True)
class Probe:
    """The answer: `details` holds for each of y, dx and dw its relative distance from the emulation
    and from the unquantised product, and its cosine with the emulation."""

    name: str
    usable: bool
    reason: str
    details: dict[str, float] = field(default_factory=dict)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_probe(backend: Backend) -> Probe:
    """Run the backend on this machine's device and judge what it returns."""
    x, weight, dy = _inputs()
    device = default_device()
    try:
        got = backend.linear(*(t.to(device) for t in (x, weight, dy)))
        got = tuple(t.detach().float().cpu() for t in got)
    except Exception as error:  # a broken installation raises anything, at import or at launch
        return Probe(backend.name, False, _one_line(error))
    exact = (x.float() @ weight.float().T, dy.float() @ weight.float(), dy.float().T @ x.float())
    emulated = tuple(t.float() for t in emulation.linear(x, weight, dy))
    details = _measure(got, emulated, exact)
    fault = _fault(got, details, backend.own_random_bits)
    return Probe(backend.name, fault is None, fault or _praise(details), details)


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, FEATURES_IN, generator=generator)
    weight = torch.randn(FEATURES_OUT, FEATURES_IN, generator=generator) * FEATURES_IN**-0.5
    dy = torch.randn(TOKENS, FEATURES_OUT, generator=generator)
    return x.bfloat16(), weight.bfloat16(), dy.bfloat16()


def _measure(got: Results, emulated: Results, exact: Results) -> dict[str, float]:
    details = {}
    for name, g, e, x in zip(NAMES, got, emulated, exact, strict=True):
        if g.shape != e.shape:
            continue
        details[f"{name}_from_emulation"] = float((g - e).norm() / e.norm())
        details[f"{name}_from_unquantised"] = float((g - x).norm() / x.norm())
        details[f"{name}_cosine"] = float((g * e).sum() / (g.norm() * e.norm()))
    return details


def _fault(got: Results, details: dict[str, float], own_random_bits: bool) -> str | None:
    """What is wrong with the results, the plainest fault first."""
    for name, result in zip(NAMES, got, strict=True):
        what = "output" if name == "y" else "gradient"
        if f"{name}_cosine" not in details:
            return f"{what} {name} has shape {tuple(result.shape)}"
        if not result.isfinite().all():
            return f"{what} {name} has {int((~result.isfinite()).sum())} values that are NaN or infinite"
        if not result.any():
            return f"{what} {name} is all zeros"
    for name in NAMES:
        cosine, distance = details[f"{name}_cosine"], details[f"{name}_from_emulation"]
        if cosine < COSINE:
            return f"{name} has cosine {cosine:.3f} with the emulation's, at least {COSINE} is wanted"
        if details[f"{name}_from_unquantised"] < QUANTISED:
            return f"{name} equals the product of unquantised operands: FP4 had no effect"
        if distance > SAME_BITS and not (own_random_bits and name != "y"):
            return f"{name} is {distance:.3f} away from the emulation's, at most {SAME_BITS} is allowed"
    return None


def _praise(details: dict[str, float]) -> str:
    distances = ", ".join(f"{name} {details[f'{name}_from_emulation']:.1g}" for name in NAMES)
    return f"forward and backward agree with the emulation on the CPU (distance {distances})"


def _one_line(error: Exception) -> str:
    """The sentence that says why; our own needs no class name before it."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, Fp4ReproError) else f"{type(error).__name__}: {text}".rstrip(": ")
