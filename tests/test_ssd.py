"""The chunked scan against the plain recurrence, token by token, in float64."""

import pytest
import torch
import torch.nn.functional as F

from fp4repro.models.ssd import ssd_scan

NAMES = ("x", "dt", "A", "B", "C", "D")


def recurrence(x, dt, A, B, C, D):
    """The definition: one state a head, (head_dim, state), updated token by token."""
    batch, length, heads, head_dim = x.shape
    per_group = heads // B.shape[2]
    state = x.new_zeros(batch, heads, head_dim, B.shape[3])
    outputs = []
    for t in range(length):
        b, c = (v[:, t].repeat_interleave(per_group, dim=1) for v in (B, C))  # (batch, heads, state)
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, :, None]
        outputs.append((state * c[:, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, dim=1)


def inputs(length, groups=1, heads=4, dtype=torch.float64, log_dt=-1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    batch, head_dim, state = 2, 3, 5
    values = (
        normal(batch, length, heads, head_dim),
        F.softplus(normal(batch, length, heads) + log_dt),
        -normal(heads).exp(),
        normal(batch, length, groups, state),
        normal(batch, length, groups, state),
        normal(heads),
    )
    return [v.to(dtype).requires_grad_() for v in values]


def gradients(function, values, upstream):
    y = function(*values)
    return y.detach(), torch.autograd.grad(y, values, upstream)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("length", "chunk"), [(24, 8), (24, 24), (24, 1), (23, 8), (33, 4), (7, 16), (1, 8)])
def test_equals_recurrence(length, chunk, groups):
    values = inputs(length, groups)
    upstream = torch.randn(values[0].shape, generator=torch.Generator().manual_seed(1)).double()
    y, found = gradients(lambda *v: ssd_scan(*v, chunk), values, upstream)
    expected, wanted = gradients(recurrence, values, upstream)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    for name, gradient, want in zip(NAMES, found, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_tolerance_sees_a_wrong_head_or_decay():
    values = inputs(24, groups=2)
    y = ssd_scan(*values, 8)
    for place, change in ((2, lambda A: A * (1 + 1e-6)), (3, lambda B: B.flip(2))):
        wrong = [change(v) if i == place else v for i, v in enumerate(values)]
        assert (recurrence(*wrong) - y).abs().max() > 1e-8


@pytest.mark.parametrize("layout", ["expanded", "heads first", "strided x"])
def test_any_memory_layout(layout):
    values = inputs(24, groups=2)
    upstream = torch.ones_like(values[0])
    if layout == "expanded":
        upstream = torch.ones((), dtype=torch.float64).expand(values[0].shape)
    elif layout == "heads first":
        upstream = torch.randn(2, 4, 24, 3).double().transpose(1, 2)
    else:
        values[0] = torch.randn(2, 4, 3, 24).double().permute(0, 3, 1, 2).requires_grad_()
    y, found = gradients(lambda *v: ssd_scan(*v, 8), values, upstream)
    expected, wanted = gradients(recurrence, values, upstream)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_float32_keeps_its_digits_over_a_long_sequence():
    """The time step's gradient is a sum of differences, in which digits could be lost."""
    exact = inputs(2048, heads=4)
    with torch.no_grad():
        exact[2].copy_(-torch.tensor([0.5, 2.0, 8.0, 16.0]))
    single = [v.detach().float().requires_grad_() for v in exact]
    upstream = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(1))
    y, found = gradients(lambda *v: ssd_scan(*v, 32), single, upstream)
    expected, wanted = gradients(lambda *v: ssd_scan(*v, 32), exact, upstream.double())
    assert y.dtype == torch.float32
    for result, want in zip((y, *found), (expected, *wanted), strict=True):
        error = ((result - want).norm() / want.norm()).item()
        assert 0 < error < 1e-4
    assert (y - expected).norm() / expected.norm() < 1e-6


def test_a_state_that_is_forgotten_at_once():
    x, dt, A, B, C, D = inputs(40)
    A = torch.full_like(A, -1e6).requires_grad_()
    y = ssd_scan(x, dt, A, B, C, D, 8)
    own = (B * C).sum(-1) * dt  # (batch, length, heads), from the one group
    torch.testing.assert_close(y, own[..., None] * x + D[:, None] * x, rtol=0, atol=1e-10)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (x, dt, A, B, C, D)))


def test_autocast_changes_nothing():
    values = inputs(24, dtype=torch.float32)
    upstream = torch.randn(values[0].shape)
    plain = gradients(lambda *v: ssd_scan(*v, 8), values, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        assert (values[0][0, 0] @ values[0][0, 0].mT).dtype == torch.bfloat16
        cast = gradients(lambda *v: ssd_scan(*v, 8), values, upstream)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


def test_causal():
    values = inputs(24)
    changed = [v.detach().clone() for v in values]
    for v in (changed[i] for i in (0, 1, 3, 4)):
        v[:, 13] += 1
    difference = (ssd_scan(*changed, 8) - ssd_scan(*values, 8)).abs().amax((0, 2, 3))  # (length,)
    assert difference[:13].max() == 0
    assert (difference[13:] > 1e-6).all()
