"""The products of a model's linears in every format, with and without quantising their operands.

For each distinct linear of a model fprop, dgrad and wgrad, each as C = A B^T with A (M, K) and B (N, K).
On a GPU the formats that it multiplies are timed natively, if the kernels' names confirm the format;
on a CPU everything is emulated, and labelled so: then times tell nothing of the format, errors do.
Errors are relative (Frobenius), on a sample of rows, against the float64 product: of the unquantised
operands (what the format costs), and of the quantised ones (what the kernel adds).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fp4repro.backends import probe
from fp4repro.bench import cuda
from fp4repro.bench.kernel_names import fault
from fp4repro.bench.products import BF16, COMPARED, Compared
from fp4repro.bench.timing import host_seconds, interleaved
from fp4repro.errors import Fp4ReproError
from fp4repro.models import ModelConfig
from fp4repro.models.config import KINDS
from fp4repro.report.schema import NOT_RUN
from fp4repro.roofline.gemm import Gemm
from fp4repro.roofline.linears import block_linears

EMULATED = "emulated on a CPU: its time tells nothing of the format's units"
CPU_FLOPS = 2**31  # of one product, at most
SAMPLED_ROWS = 64
SEED = 0


@dataclass
class Result:
    """One product in one format; times are seconds (median, p20, p80)."""

    gemm: Gemm
    compared: Compared
    count: int  # how often the linear stands in the model
    kernel: tuple[float, float, float] | None = None
    quantised: tuple[float, float, float] | None = None
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def why_not(self) -> str:
        return self.note if self.note.startswith(NOT_RUN) else ""


@dataclass(frozen=True)
class Machine:
    """Where products run: `major` compute capability, None for a CPU; `native_fp4` says why not."""

    device: torch.device
    major: int | None
    native_fp4: str = ""
    seconds_of: Callable = host_seconds
    names_of: Callable = cuda.kernel_names

    @classmethod
    def here(cls, name: str) -> "Machine":
        if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
            return cls(torch.device("cpu"), None)
        if not torch.cuda.is_available():
            raise Fp4ReproError("--device cuda: torch finds no CUDA device; use --device cpu, which emulates")
        native = probe("native")
        return cls(
            torch.device("cuda"),
            torch.cuda.get_device_capability()[0],
            "" if native.usable else native.reason,
            cuda.device_seconds(cuda.Events()),
        )

    def why_not(self, compared: Compared, gemm: Gemm) -> str:
        """Why a product cannot be timed here in that format; empty where it can."""
        if self.major is None:
            if gemm.flops > CPU_FLOPS:
                return f"{gemm.flops / 1e9:,.0f} GFLOP, too much for a CPU here; --tokens asks for fewer"
            return ""
        if not compared.runs_on(self.major):
            return f"compute capability {self.major}.x has no units for {compared.name}"
        return self.native_fp4 if compared.operand == "fp4" else ""


def model_gemms(config: ModelConfig, tokens: int) -> list[tuple[Gemm, int]]:
    """The products of every distinct linear, with how often each stands in the model."""
    kinds = dict.fromkeys(KINDS[letter] for letter in config.pattern)
    counts = {kind: sum(KINDS[letter] == kind for letter in config.pattern) for kind in kinds}
    return [
        (gemm, counts[kind])
        for kind in kinds
        for linear in block_linears(config, kind)
        for gemm in linear.gemms(tokens, None)
    ]


def measure(
    config: ModelConfig, tokens: int, rounds: int, machine: Machine, formats: Sequence[Compared] = COMPARED
) -> Iterator[Result]:
    """Every product in every format, product by product."""
    for gemm, count in model_gemms(config, tokens):
        yield from _measure(gemm, count, rounds, machine, formats)


def _operands(gemm: Gemm, device: torch.device) -> tuple[Tensor, Tensor]:
    """Normal values in BF16, the same on every device."""
    draw = torch.Generator().manual_seed(SEED)
    a = torch.randn(gemm.m, gemm.k, generator=draw)
    b = torch.randn(gemm.n, gemm.k, generator=draw)
    return a.bfloat16().to(device), b.bfloat16().to(device)


def _measure(
    gemm: Gemm, count: int, rounds: int, machine: Machine, formats: Sequence[Compared]
) -> Iterator[Result]:
    results = [Result(gemm, compared, count) for compared in formats]
    functions, ready = {}, []
    for result in results:
        why = machine.why_not(result.compared, gemm)
        if not why:
            if not ready:
                a, b = _operands(gemm, machine.device)
            why = _prepare(result, a, b, machine, functions)
        if why:
            result.note = f"{NOT_RUN}{why}"
        else:
            ready.append(result)
    timings = interleaved(functions, rounds, machine.seconds_of) if functions else {}
    for result in ready:
        name = result.compared.name
        result.kernel = timings[f"{name}/kernel"].spread
        result.quantised = timings.get(f"{name}/quantised", timings[f"{name}/kernel"]).spread
        result.note = EMULATED if machine.major is None else result.note
    yield from results


def _prepare(result: Result, a: Tensor, b: Tensor, machine: Machine, functions: dict) -> str:
    """Add the functions to be timed; return why that cannot be, if so."""
    compared = result.compared
    multiply = compared.emulated if machine.major is None else compared.native
    try:
        operands = compared.prepare(a, b)
        product = multiply(operands)
    except (RuntimeError, ValueError, Fp4ReproError) as error:  # shapes and devices that a library refuses
        return str(error).splitlines()[0]
    if machine.major is not None:
        names = machine.names_of(lambda: multiply(operands))
        if why := fault(names, compared.operand):
            return why
        result.note = f"kernels {', '.join(dict.fromkeys(names))}"
    result.errors = _errors(compared, a, b, operands, product)
    functions[f"{compared.name}/kernel"] = lambda: multiply(operands)
    if compared is not BF16:
        functions[f"{compared.name}/quantised"] = lambda: multiply(compared.prepare(a, b))
    return ""


def _errors(compared: Compared, a: Tensor, b: Tensor, operands: tuple, product: Tensor) -> dict[str, float]:
    """Relative distances from the float64 products, on evenly spaced rows."""
    rows = torch.linspace(0, a.shape[0] - 1, min(SAMPLED_ROWS, a.shape[0])).long().to(a.device)
    got = product[rows].double()
    left, right = compared.dequantised(operands)
    exact, kept = a[rows].double() @ b.double().T, left[rows] @ right.T
    return {
        "error": float((got - exact).norm() / exact.norm()),
        "error_of_kernel": float((got - kept).norm() / kept.norm()),
    }


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))
