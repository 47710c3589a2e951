"""The Hadamard transform against scipy's matrix and exact sums; it cancels in products."""

import cases
import numpy as np
import oracle
import pytest
import scipy.linalg
import torch

from fp4repro import RandomKey, hadamard
from fp4repro.core.hadamard import SIZES, hadamard_matrix

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
every_size = pytest.mark.parametrize("size", SIZES)


@every_size
def test_the_matrix_is_sylvesters_and_orthogonal(size):
    expected = scipy.linalg.hadamard(size) / np.sqrt(size)
    assert np.allclose(hadamard_matrix(size, "none").numpy(), expected, rtol=1e-7)
    signed = hadamard_matrix(size).double().numpy()
    assert np.allclose(signed, expected * np.resize(SIGNS, size)[:, None], rtol=1e-7)
    assert np.allclose(signed @ signed.T, np.eye(size), atol=1e-6)
    assert np.allclose(signed, oracle.hadamard_matrix(size), rtol=1e-7)


def test_the_signs_are_those_of_transformer_engine():
    assert (hadamard_matrix(16)[:, 0] * 4).tolist() == SIGNS
    assert sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0) == 0xD7E8


def test_entries_of_size_16_are_exact_in_bf16():
    matrix = hadamard_matrix(16)
    assert torch.equal(matrix.bfloat16().float(), matrix)
    assert matrix.abs().unique().tolist() == [0.25]


@every_size
@pytest.mark.parametrize("signs", ["te", "none", "drawn"])
def test_float32_values(size, signs):
    x = torch.from_numpy(cases.normal(size, (6, 256)))
    key = RandomKey(5)
    got = hadamard(x, size, signs, key)
    matrix = hadamard_matrix(size, signs, key).double()
    expected = (x.double().view(-1, size) @ matrix).view(6, 256)
    assert (got - expected).abs().max() < 1e-6 * expected.abs().max()
    assert (got - x).abs().max() > 0.1


@pytest.mark.parametrize("name", ["gauss_bf16", "heavy_bf16", "outlier", "zeros", "const"])
def test_bf16_is_rounded_once(name):
    x = cases.bf16(cases.NAMED[name])
    got = hadamard(torch.from_numpy(x).bfloat16())
    assert got.dtype == torch.bfloat16
    assert np.array_equal(got.float().numpy(), oracle.hadamard_bf16(x))


@every_size
def test_twice_with_the_transpose_is_the_identity(size):
    x = torch.from_numpy(cases.normal(1, (4, 256)))
    back = (hadamard(x, size).view(-1, size) @ hadamard_matrix(size).T).view(4, 256)
    assert (back - x).abs().max() < 1e-5
    assert torch.allclose(hadamard(x, size).norm(), x.norm(), rtol=1e-6)


@every_size
def test_it_cancels_in_a_product_only_if_both_sides_share_it(size):
    a, b = (torch.from_numpy(cases.normal(i, (24, 256))).double() for i in (1, 2))
    exact = a @ b.T
    both = hadamard(a, size) @ hadamard(b, size).T
    assert ((both - exact).norm() / exact.norm()).item() < 1e-6
    for one_sided in (
        hadamard(a, size) @ b.T,
        hadamard(a, size) @ hadamard(b, size, "none").T,
    ):
        if size > 4:  # the first four signs hold one minus only
            assert 1.0 < ((one_sided - exact).norm() / exact.norm()).item() < 2.0


def test_any_axis_equals_the_last_one_of_the_transpose():
    x = torch.from_numpy(cases.normal(3, (32, 48, 64)))
    for axis in (0, 1, 2, -1, -2, -3):
        got = hadamard(x, axis=axis)
        expected = hadamard(x.movedim(axis, -1).contiguous()).movedim(-1, axis)
        assert got.shape == x.shape
        assert (got - expected).abs().max() < 1e-6, axis
        exact = hadamard(x.bfloat16(), axis=axis)
        assert torch.equal(exact, hadamard(x.bfloat16().movedim(axis, -1).contiguous()).movedim(-1, axis))


def test_drawn_signs_follow_the_key_and_are_fair():
    x = torch.from_numpy(cases.normal(4, (2, 64)))
    a, b = (hadamard(x, 16, "drawn", RandomKey(1, step)) for step in (0, 1))
    assert not torch.equal(a, b)
    assert torch.equal(a, hadamard(x, 16, "drawn", RandomKey(1, 0)))
    first = torch.stack([hadamard_matrix(16, "drawn", RandomKey(2, step))[:, 0] for step in range(400)])
    assert (first.mean(0).abs() * 4 < 5 / 20).all()  # 16 means of 400 signs, five sigma
    assert (first.abs() == 0.25).all()


def test_views_and_leading_axes():
    x = torch.from_numpy(cases.normal(6, (8, 64)))
    expected = hadamard(x)
    assert torch.equal(hadamard(x.view(2, 4, 64)).view(8, 64), expected)
    assert torch.equal(hadamard(x.T.contiguous().T), expected)
    assert torch.equal(hadamard(torch.stack([x, x], 1)[:, 0]), expected)


def test_the_shared_matrix_is_not_written_to():
    before = hadamard_matrix(16).clone()
    hadamard(torch.ones(16, 16))
    assert torch.equal(hadamard_matrix(16), before)


def test_gradients_pass_through():
    x = torch.from_numpy(cases.normal(7, (2, 32))).double().requires_grad_()
    assert torch.autograd.gradcheck(hadamard, (x,))


def test_a_given_type_rounds_before_and_after():
    """Compiled: a cast within a kernel may be dropped, and was."""
    x = torch.from_numpy(cases.normal(3, (64, 48)))
    for axis in (0, 1):
        got = hadamard(x, axis=axis, dtype=torch.bfloat16)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, hadamard(x.bfloat16(), axis=axis))
        assert not torch.equal(got, hadamard(x, axis=axis).bfloat16())
