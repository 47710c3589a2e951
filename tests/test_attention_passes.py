"""The compiled passes of attention against the same in plain torch: a compiler may leave casts out."""

import pytest
import torch
from attention_cases import FULL_STACK, draw, ours

from fp4repro import AttentionRecipe
from fp4repro.attention.passes import _rounding, _row_sums
from fp4repro.core.compiled import compiled, compiling, without_compiler

needs_compiler = pytest.mark.skipif(not compiling(), reason="no C++ compiler")


@pytest.mark.parametrize("make", [lambda: compiled(_rounding), _rounding], ids=["compiled", "plain"])
def test_rounding_is_the_cast_to_bf16_and_back(make):
    """For any 32 bits, ties, infinities and every kind of NaN among them."""
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), dtype=torch.int32)
    bits[:6] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, -1])
    x = bits.view(torch.float32)[None]
    found, expected = make()(x), x.bfloat16().float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0), expected.nan_to_num(0))
    assert not torch.equal(found.nan_to_num(0), x.nan_to_num(0))


def test_row_sums_are_those_of_products():
    a, b = torch.randn(2, 3, 40, 100)
    found, exact = compiled(_row_sums)(a, b), (a.double() * b.double()).sum(-1, keepdim=True)
    assert found.shape == (3, 40, 1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("recipe", [FULL_STACK, AttentionRecipe(lowered=(), views=())])
def test_compiled_attention_has_the_bits_of_plain(recipe):
    """O, dQ, dK and dV of BF16 inputs."""
    tensors = [x.bfloat16() for x in draw(1, (4, 2), 96)]
    with_kernels = ours(recipe, *tensors)
    with without_compiler():
        plain = ours(recipe, *tensors)
    for a, b in zip(with_kernels, plain, strict=True):
        assert torch.equal(a, b)
