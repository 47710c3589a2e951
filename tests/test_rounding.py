"""Rounding to small floats, against search on the grid, ml_dtypes, and the software form of `cvt.rs`."""

import ml_dtypes
import numpy as np
import oracle
import pytest
import torch
from cases import with_neighbours

from fp4repro.core import formats
from fp4repro.core.kernels import decode_elements, encode_elements
from fp4repro.core.rounding import round_down, round_nearest, round_stochastic, round_up

FORMATS = {f.name: f for f in (formats.E2M1, formats.E4M3, formats.E5M2, formats.UE8M0, formats.UE5M3)}
PEERS = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
}
both_ways = pytest.mark.parametrize("compare", [False, True], ids=["bits", "compare"])
every_format = pytest.mark.parametrize("name", FORMATS)


def grid_of(name):
    """Every value, ascending: by the widths of exponent and mantissa alone."""
    f = FORMATS[name]
    if name == "ue8m0":
        return np.exp2(np.arange(-126.0, 128))
    whole = 2**f.mantissa_bits
    steps = np.arange(whole * 2**f.exponent_bits)
    exponent, mantissa = steps // whole, steps % whole
    value = np.where(exponent == 0, mantissa, mantissa + whole) / whole
    value = np.ldexp(value, np.maximum(exponent, 1) - 1 + f.emin)
    return value[value <= f.max]


def probes(name):
    """Every value of the grid, every midpoint, and their float32 neighbours, up to the maximum."""
    grid = grid_of(name)
    points = np.unique(with_neighbours(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])))
    return points[points <= FORMATS[name].max]


def ours(function, a, name, **options):
    return function(torch.from_numpy(np.ascontiguousarray(a)), FORMATS[name], **options).numpy()


def searched(a, name):
    """Nearest of all values; of two the one with the even code (powers of two: the larger)."""
    grid, a = grid_of(name), a.astype(np.float64)
    above = np.clip(np.searchsorted(grid, a), 1, len(grid) - 1)
    below = above - 1
    up, down = grid[above] - a, a - grid[below]
    tie_goes_up = np.ones(len(a), bool) if name == "ue8m0" else above % 2 == 0
    return np.where((up < down) | ((up == down) & tie_goes_up), grid[above], grid[below])


def test_the_grids_are_those_of_ml_dtypes():
    for name in ("e2m1", "e4m3", "e5m2"):
        assert np.array_equal(grid_of(name), oracle.grid(PEERS[name])), name
    # Code 0 of UE8M0 is subnormal in FP32 and left out on purpose.
    assert np.array_equal(grid_of("ue8m0"), oracle.grid(PEERS["ue8m0"])[1:])
    assert grid_of("ue5m3")[-1] == FORMATS["ue5m3"].max == 61440
    assert len(grid_of("ue5m3")) == 31 * 8  # the topmost exponent stays unused


@every_format
@both_ways
def test_nearest_on_every_value_midpoint_and_neighbour(name, compare):
    a = probes(name)
    got = ours(round_nearest, a, name, compare=compare)
    assert np.array_equal(got, searched(a, name))
    assert 0.1 < np.mean(got == a) < 0.9  # the probes hold both kinds


@pytest.mark.parametrize("name", PEERS)
@both_ways
def test_nearest_on_all_bfloat16_values(name, compare):
    a = np.arange(2**15, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    a = a[np.isfinite(a)]
    if name == "ue8m0":
        a = a[a >= 2.0**-126]
    a = np.minimum(a, np.float32(FORMATS[name].max))
    got = ours(round_nearest, a, name, compare=compare)
    assert np.array_equal(got, a.astype(PEERS[name]).astype(np.float32))


@both_ways
def test_nearest_on_a_dense_sweep(compare):
    """Every 1009th float32 from 0 to 6: about a million."""
    a = np.arange(0, np.float32(6).view(np.int32) + 1, 1009, dtype=np.int32).view(np.float32)
    assert len(a) > 1e6
    got = ours(round_nearest, a, "e2m1", compare=compare)
    assert np.array_equal(got, a.astype(PEERS["e2m1"]).astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_directed_rounding_on_every_value_midpoint_and_neighbour(name):
    grid, a = grid_of(name), probes(name)
    a = a[a >= grid[0]]
    index = np.searchsorted(grid, a)
    up = grid[index]
    down = np.where(up == a, up, grid[np.maximum(index - 1, 0)])
    assert np.array_equal(ours(round_up, a, name), up)
    assert np.array_equal(ours(round_down, a, name), down)
    assert (up > down).any() and (up == down).any()


@every_format
def test_the_grid_is_kept_by_every_rounding(name):
    grid = grid_of(name).astype(np.float32)
    for function in (round_nearest, round_up, round_down):
        assert np.array_equal(ours(function, grid, name), grid)


def test_zero_and_subnormals_reach_the_smallest_power_of_two():
    a = np.array([0, 1e-45, 1e-39, 2.0**-126], np.float32)
    for function in (round_nearest, round_up, round_down):
        assert np.array_equal(ours(function, a, "ue8m0"), np.full(4, 2.0**-126, np.float32))


@pytest.mark.parametrize(
    "name, sign",
    [(n, s) for n in FORMATS for s in (1, -1) if n != "ue8m0" and (s > 0 or FORMATS[n].signed)],
)
def test_codes_and_back(name, sign):
    f = FORMATS[name]
    values = torch.from_numpy(grid_of(name).astype(np.float32))
    negative = torch.full(values.shape, sign < 0) if f.signed else None
    expected = np.arange(len(values)) + (sign < 0) * (1 << f.bits - 1)
    for compare in (False, True):
        codes = encode_elements(values, negative, f, compare)
        assert np.array_equal(codes.numpy(), expected)
        assert torch.equal(decode_elements(codes, f, compare), sign * values)


def values_for_stochastic():
    rng = np.random.default_rng(0)
    few_bits = np.arange(0, 6 * 512 + 1) / 512
    return np.concatenate([few_bits, probes("e2m1"), rng.uniform(0, 6, 2000)]).astype(np.float32)


@both_ways
def test_stochastic_equals_the_software_form_for_every_byte(compare):
    a = values_for_stochastic()
    a, byte = (m.ravel() for m in np.meshgrid(a, np.arange(256, dtype=np.uint8), indexing="ij"))
    random = torch.from_numpy(byte)
    got = round_stochastic(torch.from_numpy(a), formats.E2M1, random, 8, compare).numpy()
    assert np.array_equal(got, oracle.stochastic_e2m1(a, byte))
    assert 0.2 < np.mean(got > a) < 0.8


@both_ways
def test_stochastic_counts_are_the_fraction_cut_to_256ths(compare):
    """Exact, by integers: of the 256 bytes floor(256 fraction) round up; only towards zero is the
    expectation off, by less than step / 256."""
    numerators = np.arange(0, 6 * 1024)  # a = n / 1024
    a = (numerators / 1024).astype(np.float32)
    step = np.where(a < 2, 512, np.where(a < 4, 1024, 2048))  # in 1024ths
    expected = numerators % step * 256 // step
    tile = torch.from_numpy(np.repeat(a, 256))
    random = torch.arange(256, dtype=torch.uint8).repeat(len(a))
    got = round_stochastic(tile, formats.E2M1, random, 8, compare).view(-1, 256).numpy()
    assert np.array_equal((got > a[:, None]).sum(1), expected)
    bias = got.mean(1) - a
    assert (bias <= 0).all() and (bias > -step / 1024 / 256).all() and (bias < 0).any()


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
@pytest.mark.parametrize("bits", [8, 16, 32])
@both_ways
def test_stochastic_keeps_the_grid_whatever_the_random_bits(name, bits, compare):
    grid = torch.from_numpy(grid_of(name).astype(np.float32))
    kind = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[bits]
    for random in (0, 1, 2 ** (bits - 1), 2**bits - 2, 2**bits - 1):
        words = torch.full(grid.shape, random, dtype=torch.int64).to(kind)
        assert torch.equal(round_stochastic(grid, FORMATS[name], words, bits, compare), grid), random


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_stochastic_goes_to_a_neighbour_in_proportion(name):
    grid = grid_of(name)
    rng = np.random.default_rng(1)
    index = rng.integers(0, len(grid) - 1, 500)
    eighths = rng.integers(1, 8, 500)
    a = grid[index] + (grid[index + 1] - grid[index]) * eighths / 8
    random = torch.arange(256, dtype=torch.uint8).repeat(500)
    tiled = torch.from_numpy(np.repeat(a, 256).astype(np.float32))
    got = round_stochastic(tiled, FORMATS[name], random).view(500, 256).numpy()
    assert np.array_equal((got == grid[index + 1][:, None]).sum(1), 32 * eighths)
    assert np.array_equal((got == grid[index][:, None]).sum(1), 256 - 32 * eighths)


def test_fp32_is_left_alone():
    a = torch.rand(64)
    for function in (round_nearest, round_up, round_down):
        assert torch.equal(function(a, formats.FP32), a)
