"""The C++ step of the 4-bit AdamW against the torch one, to the bit; skipped without a compiler."""

import pytest
import torch
from torch import nn

from fp4repro.core.compiled import compiler_usable, without_compiler
from fp4repro.optim import NVFP4AdamW, fused
from fp4repro.optim.codecs import exact_sqrt
from fp4repro.optim.fused import fusable
from fp4repro.recipes.optimizer import FIRST_MOMENT, SECOND_MOMENT, SECOND_MOMENTS

SHAPES = ((64, 128), (33, 160), (257, 16), (100, 48), (40, 1024))  # whole groups of 256 elements, and rests
CPU = torch.device("cpu")


@pytest.fixture
def compiler():
    if not compiler_usable():
        pytest.skip("no C++ compiler")


def trained(eager: bool, scale: float = 1.0, steps: int = 5, **options):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = NVFP4AdamW(params, 1e-2, betas=(0.9, 0.95), **options)
    for step in range(steps):
        for number, p in enumerate(params):
            rows = torch.randn(p.shape[0], 1, generator=generator).exp()
            p.grad = scale * 10.0 ** -(step % 4) * rows * torch.randn(p.shape, generator=generator)
            p.grad[:: number + 2] = 0  # rows without a gradient, and blocks of zeros
        params[-1].grad.zero_()  # a tensor of zeros
        if eager:
            with without_compiler():
                optimizer.step()
        else:
            optimizer.step()
    used = {bucket._fused for _, buckets in optimizer._buckets.values() for bucket in buckets}
    assert used == {not eager and fusable((FIRST_MOMENT, options.get("second", SECOND_MOMENT)), CPU)}
    return params, optimizer


def leaves(optimizer, p):
    moments = {m: optimizer.state[p][m] for m in ("exp_avg", "exp_avg_sq")}
    coded = {m: s if isinstance(s, dict) else {"": s} for m, s in moments.items()}  # as it is: too narrow
    return {(m, name): t for m, s in coded.items() for name, t in s.items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("scale", "floor"), [(1.0, 0.2), (1e-12, 0.2), (1e6, 0.0)], ids=["ordinary", "tiny", "large"]
)
def test_parameters_and_states_are_torchs_to_the_bit(compiler, scale, floor, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        second = SECOND_MOMENT.replace(floor=floor)
        (ours, a), (theirs, b) = (trained(eager, scale, second=second) for eager in (False, True))
    finally:
        torch.set_num_threads(before)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        expected = leaves(b, q)
        for name, value in leaves(a, p).items():
            assert torch.equal(value.view(torch.uint8), expected[name].view(torch.uint8)), name
    start = torch.randn(SHAPES[0], generator=torch.Generator().manual_seed(0))
    assert not torch.equal(ours[0], start)


@pytest.mark.parametrize("lanes", [8, 4])
def test_narrower_vectors_give_the_same_bits(compiler, monkeypatch, lanes):
    """Those of processors without AVX-512, and without AVX2."""
    monkeypatch.setattr(fused, "FLAGS", (*fused.FLAGS, f"-DFP4REPRO_LANES={lanes}"))
    fused._library.cache_clear()
    try:
        (ours, a), (theirs, b) = trained(False), trained(True)
    finally:
        fused._library.cache_clear()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        expected = leaves(b, q)
        assert all(
            torch.equal(t.view(torch.uint8), expected[n].view(torch.uint8)) for n, t in leaves(a, p).items()
        )


def test_a_parameter_of_more_than_a_million_elements(compiler):
    """Its moments are computed twice and not kept between the passes."""
    found = []
    for eager in (False, True):
        p = nn.Parameter(torch.randn(1025, 1040, generator=torch.Generator().manual_seed(2)))
        optimizer = NVFP4AdamW([p])
        for step in range(2):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            if eager:
                with without_compiler():
                    optimizer.step()
            else:
                optimizer.step()
        found.append((p, leaves(optimizer, p)))
    (p, ours), (q, theirs) = found
    assert torch.equal(p, q)
    assert all(torch.equal(t.view(torch.uint8), theirs[name].view(torch.uint8)) for name, t in ours.items())


# What inductor compiles and what it is kept from, each shown by one codec; the others take minutes.
QUICK = ("sqrt-mean", "sqrt-mean128-hadamard128", "log2-clamped")


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n, c in SECOND_MOMENTS.items() if c],
)
def test_other_codecs_step_has_the_same_bits_with_a_compiler(compiler, name):
    (ours, a), (theirs, b) = (trained(eager, second=SECOND_MOMENTS[name]) for eager in (False, True))
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        expected = leaves(b, q)
        assert all(
            torch.equal(t.view(torch.uint8), expected[n].view(torch.uint8)) for n, t in leaves(a, p).items()
        )


def test_a_different_step_would_be_noticed(compiler):
    """The comparison above can fail: one bit of beta2 changes codes and parameters."""
    (ours, _), (theirs, b) = trained(False), trained(True)
    b.param_groups[0]["betas"] = (0.9, 0.95 + 2e-7)
    for p in theirs:
        p.grad = torch.ones_like(p)
    for p, q in zip(ours, theirs, strict=True):
        p.grad = q.grad.clone()
    a_params = [p.detach().clone() for p in theirs]
    with without_compiler():
        b.step()
    assert not all(torch.equal(x, y) for x, y in zip(a_params, theirs, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_a_nan_poisons_its_tensor_and_no_other(compiler):
    params, optimizer = trained(False)
    params[1].grad[3, 5] = torch.nan
    optimizer.step()
    optimizer.step()
    assert [bool(p.isnan().all()) for p in params] == [False, True, False, False, False]
    assert not params[0].isnan().any()


def test_gradients_of_other_types_and_layouts(compiler):
    """A transposed gradient is taken by its elements, a BF16 parameter's state stays FP32."""
    params, optimizer = trained(False)
    others, reference = trained(False)
    for p, q in zip(params, others, strict=True):
        q.grad = torch.randn(q.shape)
        p.grad = q.grad.t().contiguous().t()
        assert not p.grad.is_contiguous()
    optimizer.step()
    reference.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_what_the_kernel_serves(compiler):
    assert fusable((FIRST_MOMENT, SECOND_MOMENT), CPU)
    assert fusable((FIRST_MOMENT, SECOND_MOMENTS["sqrt-mean-hadamard"]), CPU)
    for other in ("sqrt", "sqrt-hadamard-mean", "sqrt-mean128-hadamard128", "linear4-no-zero", "fp32"):
        assert not fusable((FIRST_MOMENT, SECOND_MOMENTS[other]), CPU)
    assert not fusable((FIRST_MOMENT.replace(rounding="stochastic"), SECOND_MOMENT), CPU)
    assert not fusable((None, SECOND_MOMENT), CPU)
    with without_compiler():
        assert not fusable((FIRST_MOMENT, SECOND_MOMENT), CPU)


def test_roots_are_rounded_once():
    x = torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 1e-6
    expected = torch.tensor([float(v) ** 0.5 for v in x.tolist()], dtype=torch.float64).float()
    assert torch.equal(exact_sqrt(x), expected)
