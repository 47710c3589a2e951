"""Which selective scan runs: mamba-ssm's CUDA kernels where they agree with ours, else ours.

`mamba_chunk_scan_combined` of mamba-ssm (Dao and Gu 2024, arXiv 2405.21060, section 6, in Triton) takes
the same tensors as `ssd_scan`. It is used on CUDA alone, and only after a forward and backward on a
small input came within `TOLERANCE` of ours: a kernel that was built for another GPU or another torch
may run and be wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4repro.models.ssd import ssd_scan

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
TOLERANCE = 1e-2  # of the greatest value: the kernels multiply in TF32
_BATCH, _LENGTH, _HEADS, _HEAD_DIM, _GROUPS, _STATE, _CHUNK = 2, 96, 4, 32, 2, 16, 32


@dataclass(frozen=True)
class Choice:
    """The scan of a device, its name, and why it is the one."""

    scan: Scan
    name: str
    reason: str

    def __str__(self) -> str:
        return f"scan: {self.name} ({self.reason})"


_chosen: dict[str, Choice] = {}  # torch.compile reads a dict as it is, and sees past functools.cache


def choose_scan(device_type: str) -> Choice:
    """The scan for tensors on "cpu" or "cuda", tried once in a process."""
    if device_type not in _chosen:
        _chosen[device_type] = _choose(device_type)
    return _chosen[device_type]


def _choose(device_type: str) -> Choice:
    if device_type != "cuda":
        return Choice(ssd_scan, "fp4repro", "mamba-ssm's kernels need CUDA")
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as error:  # a build against another torch fails at import in many ways
        reason = "is not installed" if isinstance(error, ImportError) else f"does not import: {error}"
        return Choice(ssd_scan, "fp4repro", f"mamba-ssm {reason}")

    def kernel(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk: int) -> Tensor:
        return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size=chunk, D=D)

    fault = disagreement(kernel, device_type)
    if fault:
        return Choice(ssd_scan, "fp4repro", f"mamba-ssm's kernel was tried and {fault}")
    return Choice(kernel, "mamba-ssm", "agrees with fp4repro's, forward and backward")


def disagreement(kernel: Scan, device: str) -> str:
    """What is wrong with a kernel's output and gradients beside ours; empty where nothing is."""
    expected = _output_and_gradients(ssd_scan, device)
    try:
        found = _output_and_gradients(kernel, device)
    except Exception as error:  # whatever a kernel raises on this device, ours takes its place
        return f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    for name, ours in expected.items():
        error = (found[name].float() - ours).abs().max() / ours.abs().max()
        if not error <= TOLERANCE:  # also where it is NaN
            return f"its {name} is off by {error:.2g} of the greatest value"
    return ""


def _output_and_gradients(scan: Scan, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs = {
        "x": normal(_BATCH, _LENGTH, _HEADS, _HEAD_DIM),
        "dt": normal(_BATCH, _LENGTH, _HEADS).sigmoid() / 10,
        "A": -normal(_HEADS).exp(),
        "B": normal(_BATCH, _LENGTH, _GROUPS, _STATE),
        "C": normal(_BATCH, _LENGTH, _GROUPS, _STATE),
        "D": normal(_HEADS),
    }
    inputs = {name: tensor.to(device).requires_grad_() for name, tensor in inputs.items()}
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        y = scan(*inputs.values(), _CHUNK)
        gradients = torch.autograd.grad(y, list(inputs.values()), normal(*y.shape).to(device))
    named = zip(inputs, gradients, strict=True)
    return {"output": y.detach()} | {f"gradient of {name}": gradient for name, gradient in named}
