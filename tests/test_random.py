"""Random bits from keys and indices: uniform, independent across every part of the key, stateless."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from fp4repro import NVFP4, RandomKey, quantize
from fp4repro.core import kernels
from fp4repro.core.random import fields_of, hash_index, random_bits, words_needed
from fp4repro.errors import Fp4ReproError

N = 1 << 16
KEYS = [
    RandomKey(),
    *(dataclasses.replace(RandomKey(), **{f.name: 1}) for f in dataclasses.fields(RandomKey)),
    RandomKey(seed=2),
    RandomKey(seed=1, step=1),
    RandomKey(step=2, layer=1),
    RandomKey(step=1, layer=2),
]


def bits_of(words: np.ndarray) -> np.ndarray:
    """(n, 32) zeros and ones."""
    return np.unpackbits(words.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1)


def words(key, count=N):
    return random_bits(count, key, 32).numpy()


@pytest.mark.parametrize("key", KEYS[:5], ids=str)
def test_bytes_are_uniform(key):
    counts = np.bincount(random_bits(4 * N, key, 8).numpy(), minlength=256)
    assert 1e-6 < stats.chisquare(counts).pvalue < 1 - 1e-6


@pytest.mark.parametrize("position", range(4))
def test_bytes_are_uniform_at_each_place_in_the_word(position):
    counts = np.bincount(random_bits(4 * N, RandomKey(7), 8).numpy()[position::4], minlength=256)
    assert 1e-6 < stats.chisquare(counts).pvalue < 1 - 1e-6


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 16, 64, 1024])
def test_pairs_of_bytes_at_a_distance_are_uniform(lag):
    b = random_bits(16 * N, RandomKey(3), 8).numpy().astype(int) >> 4
    counts = np.bincount(b[:-lag] * 16 + b[lag:], minlength=256)
    assert 1e-6 < stats.chisquare(counts).pvalue < 1 - 1e-6


def test_streams_are_independent():
    """Every pair: equal words as rare as chance has it, each bit uncorrelated, also shifted."""
    streams = [words(key) for key in KEYS]
    for a, b in itertools.combinations(streams, 2):
        assert (a == b).sum() <= 2
        agree = (bits_of(a) == bits_of(b)).mean(0)
        assert abs(agree - 0.5).max() < 6 * 0.5 / np.sqrt(N)
        for shift in (1, 2, 4, 64):
            agree = (bits_of(a[:-shift]) == bits_of(b[shift:])).mean()
            assert abs(agree - 0.5) < 6 * 0.5 / np.sqrt(32 * (N - shift))


def test_sums_across_many_streams_have_no_excess_variance():
    """Averages over steps shrink as for independent draws: the fault of one seed for all steps."""
    count = 400
    uniform = np.stack([random_bits(1024, RandomKey(5, step), 16).numpy() / 2**16 for step in range(count)])
    z = (uniform.mean(0) - 0.5) * np.sqrt(12 * count)
    assert 0.85 < z.std() < 1.15
    assert abs(z).max() < 5


def test_one_bit_of_key_or_index_changes_half_of_the_word():
    index = torch.arange(0, 1 << 22, 1021, dtype=torch.int32)
    start = bits_of(hash_index(index, RandomKey(9).tensor()).numpy())
    for flipped in range(31):
        other = bits_of(hash_index(index ^ (1 << flipped), RandomKey(9).tensor()).numpy())
        change = (start != other).mean(0)
        assert abs(change - 0.5).max() < 0.1, f"bit {flipped} of the index"
    for part, flipped in itertools.product(("seed", "step", "layer", "role"), (0, 1, 7, 20, 31)):
        key = dataclasses.replace(RandomKey(9), **{part: getattr(RandomKey(9), part) ^ 1 << flipped})
        change = (start != bits_of(hash_index(index, key.tensor()).numpy())).mean(0)
        assert abs(change - 0.5).max() < 0.05, f"bit {flipped} of {part}"


def test_either_word_of_the_key_changes_the_stream_by_itself():
    index, key = torch.arange(N, dtype=torch.int32), RandomKey(9).tensor()
    start = bits_of(hash_index(index, key).numpy())
    for word in (0, 1):
        other = key.clone()
        other[word] ^= 0x5A5A5A5A
        change = (start != bits_of(hash_index(index, other).numpy())).mean(0)
        assert abs(change - 0.5).max() < 0.05, word


def test_equal_keys_give_equal_bits_and_leave_no_state():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert np.array_equal(words(RandomKey(1, 2, 3, 4)), words(RandomKey(1, 2, 3, 4)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_longer_draw_begins_with_the_shorter_one():
    for bits in (8, 16, 32):
        long = random_bits(1000, RandomKey(4), bits)
        assert torch.equal(random_bits(77, RandomKey(4), bits).int(), long[:77].int())


def test_fields_are_cut_from_the_lowest_bits_up():
    word = torch.tensor([0x04030201, -1], dtype=torch.int32)
    assert fields_of(word, 8, 8).tolist() == [1, 2, 3, 4, 255, 255, 255, 255]
    assert fields_of(word, 3, 16).tolist() == [0x0201, 0x0403, 0xFFFF]
    assert fields_of(word, 2, 32).tolist() == [0x04030201, 0xFFFFFFFF]
    assert [words_needed(5, bits) for bits in (8, 16, 32)] == [2, 3, 5]
    key = RandomKey(8)
    w = random_bits(8, key, 32).numpy()
    assert np.array_equal(random_bits(32, key, 8).numpy(), w.astype("<u4").view(np.uint8))
    assert np.array_equal(random_bits(16, key, 16).numpy(), w.astype("<u4").view(np.uint16))


def test_other_widths_are_refused():
    with pytest.raises(Fp4ReproError, match="8, 16 or 32, not 4"):
        random_bits(16, RandomKey(), 4)


def test_wide_and_negative_parts_of_a_key_are_told_apart():
    seeds = [0, 1, -1, 2**31, 2**32, 2**32 + 1, 2**63, -(2**31), 12345678901234567890]
    assert len({RandomKey(seed).words() for seed in seeds}) == len(seeds)
    parts = range(4)
    grid = {RandomKey(*p).words() for p in itertools.product(parts, parts, parts, parts)}
    assert len(grid) == 4**4


def test_quantising_draws_each_element_its_own_byte_in_order(eager):
    """The noise kernel is `random_bits`, and element i of the flattened tensor gets byte i."""
    key, like = RandomKey(6, 5, 4, 3), torch.empty(300, dtype=torch.int8)
    noise = kernels.make_noise()(like, key.tensor())
    assert torch.equal(noise, hash_index(torch.arange(300, dtype=torch.int32), key.tensor()))
    x = torch.full((64, 64), 0.25)
    x[:, ::16] = 6.0  # scale of a power of two; elements at half of the first step
    x[0, 0] = 2688.0
    x[0, 1:16] = 0
    up = quantize(x, NVFP4, "stochastic", key).dequantize() == 0.5
    byte = random_bits(64 * 64, key, 8).view(64, 64)
    expected = (byte >= 128) & (x == 0.25)
    assert torch.equal(up, expected)
    for block in ((16, 1), (16, 16)):
        x = torch.full((64, 64), 0.25)
        x[::16] = 6.0
        x[:, 0] = 2688.0 if block == (16, 1) else x[:, 0]
        x[0, 0] = 2688.0
        got = quantize(x, NVFP4.with_block(*block), "stochastic", key).dequantize()
        inside = x == 0.25
        inside[:16, :16] = False
        assert torch.equal((got == 0.5) & inside, (byte >= 128) & inside)


def test_threads_do_not_matter(eager):
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(quantize(x, NVFP4, "stochastic", RandomKey(1)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0].codes, other.codes)
