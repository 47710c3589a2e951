"""Which scan is chosen: a foreign kernel runs only where it imports and agrees with ours."""

import sys
import types

import pytest
import torch

from fp4repro.models import scan
from fp4repro.models.ssd import ssd_scan


def as_mamba_ssm(function):
    """A stand-in for mamba-ssm whose kernel is `function` of our arguments."""

    def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None):
        return function(x, dt, A, B, C, D, chunk_size)

    name = "mamba_ssm.ops.triton.ssd_combined"
    parts = name.split(".")
    modules = {".".join(parts[:n]): types.ModuleType(parts[n - 1]) for n in range(1, len(parts) + 1)}
    modules[name].mamba_chunk_scan_combined = mamba_chunk_scan_combined
    return modules


def stepwise(x, dt, A, B, C, D, chunk):
    """The recurrence token by token: right, and no relation of ours."""
    heads = x.shape[2]
    B, C = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    state, out = 0, []
    for t in range(x.shape[1]):
        new = dt[:, t, :, None, None] * B[:, t, :, :, None] * x[:, t, :, None, :]
        state = (dt[:, t] * A).exp()[:, :, None, None] * state + new
        out.append((C[:, t, :, :, None] * state).sum(-2) + D[:, None] * x[:, t])
    return torch.stack(out, 1)


def broken_backward(*args):
    y = ssd_scan(*args)
    return y.detach() + 0 * y  # the right output, no gradient


def failing(*args):
    raise RuntimeError("no kernel image is available\nfor this device")


def test_the_cpu_runs_our_scan():
    choice = scan.choose_scan("cpu")
    assert choice.scan is ssd_scan
    assert str(choice) == "scan: fp4repro (mamba-ssm's kernels need CUDA)"


def test_a_right_kernel_agrees():
    assert scan.disagreement(stepwise, "cpu") == ""


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (lambda *a: 1.02 * ssd_scan(*a), "its output is off by"),
        (broken_backward, "its gradient of x is off by"),
        (lambda *a: ssd_scan(*a) * float("nan"), "its output is off by nan"),
        (failing, "failed: no kernel image is available"),
    ],
)
def test_a_wrong_kernel_is_found_out(kernel, fault):
    assert scan.disagreement(kernel, "cpu").startswith(fault)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """`choose_scan("cuda")` as on a machine with a GPU; the trial itself runs on the CPU."""
    tried = scan.disagreement
    monkeypatch.setattr(scan, "disagreement", lambda kernel, device: tried(kernel, "cpu"))
    monkeypatch.setattr(scan, "_chosen", {})
    return monkeypatch


def test_without_mamba_ssm_ours_runs(on_a_gpu):
    on_a_gpu.setitem(sys.modules, "mamba_ssm", None)
    assert str(scan.choose_scan("cuda")) == "scan: fp4repro (mamba-ssm is not installed)"


@pytest.mark.parametrize(
    ("kernel", "name", "reason"),
    [(stepwise, "mamba-ssm", "agrees"), (failing, "fp4repro", "was tried and failed: no kernel image")],
)
def test_mamba_ssm_runs_where_it_agrees(on_a_gpu, kernel, name, reason):
    for module, stand_in in as_mamba_ssm(kernel).items():
        on_a_gpu.setitem(sys.modules, module, stand_in)
    choice = scan.choose_scan("cuda")
    assert choice.name == name and reason in choice.reason
    assert (choice.scan is ssd_scan) == (name == "fp4repro")
