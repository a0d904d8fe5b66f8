"""The computed order: each index once, and statistical tests of shuffling.

Each test turns what it counts into one number z that is standard normal for a uniformly random
permutation, and asks for |z| < 4. Chance alone exceeds that in 1 of 16,000 tests, at fixed seeds
never again. Sums over many seeds make small deviations large. A network of two rounds, which is too
few, fails them.
"""

import math
from bisect import bisect_left
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcddp.train.input import permutation
from hpcddp.train.input.permutation import SMALL, Permutation, shuffled
from hpcddp.train.input.plain_order import PlainPermutation

LIMIT = 4.0
# The smallest network, one without a pair too many (66 rows of 64), and larger ones.
SIZES = [
    SMALL + 1,
    66 * 64,
    pytest.param(5000, marks=pytest.mark.full),
    pytest.param(10_007, marks=pytest.mark.full),
]
LARGE = (1 << 17) + 1


def whole(size, seed, epoch=0, rounds=permutation.ROUNDS):
    """All of an order, by the network."""
    return Permutation(size, seed, epoch, rounds)(np.arange(size)).astype(np.int64)


def z_of_chi2(statistic, freedom):
    """Wilson and Hilferty's cube root, which makes chi-square normal (1931)."""
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(spread)


def z_of_counts(counts, expected):
    """Counts of independent events beside what is expected of each."""
    return z_of_chi2(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)


def z_of_grid(first, second, size, bins=32):
    """Two permutations of the same positions, as points of a square; its margins are fixed."""
    cells = (first * bins // size) * bins + second * bins // size
    counts = np.bincount(cells, minlength=bins * bins)
    width = np.bincount(np.arange(size) * bins // size)
    rounds = len(first) / size
    expected = rounds * np.outer(width, width).ravel() / size
    statistic = ((counts - expected) ** 2 / expected).sum() * (size - 1) / size
    return z_of_chi2(statistic, (bins - 1) ** 2)


def z_of_mean(values, mean, variance):
    return (np.mean(values) - mean) / math.sqrt(variance / len(values))


@given(st.integers(1, 30_000), st.integers(0, 2**63), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_each_index_comes_once(size, seed, epoch):
    found = np.sort(whole(size, seed, epoch))
    assert np.array_equal(found, np.arange(size))
    if seed < 2**62:
        found = np.sort(shuffled(size, seed, epoch)(np.arange(size)))
        assert np.array_equal(found, np.arange(size))


@pytest.mark.parametrize("size", [2**20, 2**20 + 1, 1_100_000])
def test_each_index_of_a_large_set_comes_once(size):
    assert np.array_equal(np.sort(whole(size, 1)), np.arange(size))


@pytest.mark.parametrize("size", [10**9, 2**32, 2**32 + 1, 10**12, 2**62])
def test_any_place_of_a_huge_order_is_there_at_once(size):
    """In numbers of 32 bits, and above of 64."""
    order = shuffled(size, 3, 4)
    ends = np.concatenate([np.arange(20_000), np.arange(size - 20_000, size)])
    found = order(ends).astype(np.int64)
    assert found.min() >= 0 and found.max() < size
    assert len(np.unique(found)) == len(ends)
    assert np.array_equal(order(ends[::-7]), found[::-7])
    assert abs(z_of_mean(found / size, 0.5, 1 / 12)) < LIMIT


def position_and_value(size, rounds):
    """Where each index goes to, over 200 seeds."""
    orders = np.concatenate([whole(size, seed, rounds=rounds) for seed in range(200)])
    return [z_of_grid(np.tile(np.arange(size), 200), orders, size)]


def place_by_place(size, rounds):
    """What lies at the first, a middle and the last place, over 4,000 seeds."""
    places = np.array([0, 1, size // 2, size - 1])
    found = np.stack([Permutation(size, s, 0, rounds)(places) for s in range(4000)]).astype(int)
    width = np.bincount(np.arange(size) * 50 // size)
    return [
        z_of_counts(np.bincount(column * 50 // size, minlength=50), width * 4000 / size)
        for column in found.T
    ]


def fixed_points(size, rounds):
    """Of 1,000 orders; Poisson with mean 1."""
    places = np.arange(size)
    found = [int((whole(size, s, rounds=rounds) == places).sum()) for s in range(1000)]
    expected = [math.exp(-1) / math.factorial(k) for k in range(5)]
    counts = np.bincount(np.minimum(found, 5), minlength=6)
    return [z_of_counts(counts, 1000 * np.array([*expected, 1 - sum(expected)]))]


def inversions(size, rounds):
    """Pairs in the wrong order among 400 places, over 200 seeds: mean and variance."""
    n, places = 400, np.arange(400) * (size // 400)
    found = []
    for seed in range(200):
        order = Permutation(size, seed, 0, rounds)(places)
        found.append(int(np.triu(order[:, None] > order, 1).sum()))
    mean, variance = n * (n - 1) / 4, n * (n - 1) * (2 * n + 5) / 72
    spread = z_of_chi2(((np.array(found) - mean) ** 2).sum() / variance, 200)
    return [z_of_mean(found, mean, variance), spread]


def cycles(size, rounds):
    """Their number over 300 seeds, and whether it is even as often as odd."""
    found = [_cycles(whole(size, seed, rounds=rounds).tolist()) for seed in range(300)]
    harmonic = sum(1 / k for k in range(1, size + 1))
    variance = harmonic - sum(1 / k**2 for k in range(1, size + 1))
    even = np.array(found) % 2 == 0
    return [z_of_mean(found, harmonic, variance), z_of_mean(even, 0.5, 0.25)]


def _cycles(order):
    number, seen = 0, [False] * len(order)
    for start in range(len(order)):
        if not seen[start]:
            number += 1
            while not seen[start]:
                seen[start] = True
                start = order[start]
    return number


def ascents(size, rounds):
    """Places whose successor is larger: Eulerian numbers, mean and variance over 500 seeds."""
    found = [int((np.diff(whole(size, s, rounds=rounds)) > 0).sum()) for s in range(500)]
    mean, variance = (size - 1) / 2, (size + 1) / 12
    spread = z_of_chi2(((np.array(found) - mean) ** 2).sum() / variance, 500)
    return [z_of_mean(found, mean, variance), spread]


def runs(size, rounds):
    """Lengths of ascending runs; without the element after each they are independent (Knuth, The
    Art of Computer Programming, vol. 2, 3.3.2, exercise 14)."""
    counts = np.zeros(6)
    for seed in range(100):
        order = whole(size, seed, rounds=rounds).tolist()
        at = 0
        while at < size - 12:
            length = 1
            while order[at + length] > order[at + length - 1] and at + length < size - 1:
                length += 1
            counts[min(length, 6) - 1] += 1
            at += length + 1
    chance = [1 / math.factorial(k) - 1 / math.factorial(k + 1) for k in range(1, 6)]
    return [z_of_counts(counts, counts.sum() * np.array([*chance, 1 - sum(chance)]))]


def longest_ascent(size, rounds):
    """The longest increasing subsequence, beside that of NumPy's own shuffle, 100 times each."""
    generator = np.random.default_rng(0)
    ours = [_ascent(whole(size, seed, rounds=rounds).tolist()) for seed in range(100)]
    theirs = [_ascent(generator.permutation(size).tolist()) for _ in range(100)]
    variance = np.var(ours, ddof=1) + np.var(theirs, ddof=1)
    return [z_of_mean(ours, np.mean(theirs), variance)]


def _ascent(order):
    """Its length, by patience sorting."""
    piles = []
    for value in order:
        at = bisect_left(piles, value)
        piles[at : at + 1] = [value]
    return len(piles)


def epochs_and_seeds(size, rounds):
    """An epoch's order beside the next epoch's and the next seed's, over 100 seeds."""
    found = []
    for other in ((0, 1), (1, 0)):
        pairs = [
            (whole(size, s, 0, rounds), whole(size, s + other[0], other[1], rounds))
            for s in range(100)
        ]
        first, second = (np.concatenate(part) for part in zip(*pairs, strict=True))
        found.append(z_of_grid(first, second, size))
        same = [int((a == b).sum()) for a, b in pairs]
        found.append(z_of_mean(same, 1, 1))
    return found


def neighbours(size, rounds):
    """Distances of values that lie a few places, a row or half the network apart: 2 seeds, of a
    large set. Their histogram, how many different ones, and the correlation."""
    row = 1 << ((LARGE - 1).bit_length() // 2)
    found = []
    for seed in range(2):
        order = whole(LARGE, seed, rounds=rounds)
        for lag in (1, 2, 3, 8, 1000, row // 2, row, 2 * row, LARGE // 2):
            distance = (np.roll(order, -lag) - order) % LARGE
            counts = np.bincount((distance - 1) * 256 // (LARGE - 1), minlength=256)
            width = np.bincount(np.arange(LARGE - 1) * 256 // (LARGE - 1))
            found.append(z_of_counts(counts, width * (LARGE / (LARGE - 1))))
            different = len(np.unique(distance))
            found.append(_z_of_different(different))
            found.append(np.corrcoef(order, np.roll(order, -lag))[0, 1] * math.sqrt(LARGE))
            found.append(z_of_grid(order, np.roll(order, -lag), LARGE, 64))
    return found


def _z_of_different(number):
    """Different values among LARGE draws of as many (occupied cells)."""
    e = math.exp(-1)
    return (number - LARGE * (1 - e)) / math.sqrt(LARGE * e * (1 - 2 * e))


def strides(size, rounds):
    """What a rank reads: every world-size-th place holds values from everywhere, of every remainder
    and every low bit alike. 4 seeds, of a large set; drawn without replacement."""
    found = []
    for seed in range(4):
        order = Permutation(LARGE, seed, 0, rounds)
        for world in (2, 3, 8, 64, 512, 1000):
            mine = order(np.arange(world // 2, LARGE, world)).astype(np.int64)
            left = (LARGE - 1) / (LARGE - len(mine))
            for cells, bins in ((mine * 100 // LARGE, 100), (mine % world, world), (mine % 16, 16)):
                every = np.arange(LARGE)
                all_cells = {100: every * 100 // LARGE, world: every % world, 16: every % 16}[bins]
                expected = np.bincount(all_cells) * (len(mine) / LARGE)
                counts = np.bincount(cells, minlength=bins)
                if expected.min() >= 4:
                    statistic = ((counts - expected) ** 2 / expected).sum() * left
                    found.append(z_of_chi2(statistic, bins - 1))
    return found


SMALL_SETS = [position_and_value, place_by_place, fixed_points, inversions, cycles, ascents, runs,
              longest_ascent, epochs_and_seeds]  # fmt: skip
LARGE_SETS = [neighbours, strides]


@pytest.mark.parametrize("test", SMALL_SETS)
@pytest.mark.parametrize("size", SIZES)
def test_shuffled_as_by_chance(test, size):
    assert max(map(abs, test(size, permutation.ROUNDS))) < LIMIT


@pytest.mark.parametrize("test", LARGE_SETS)
def test_a_large_set_is_shuffled_as_by_chance(test):
    assert max(map(abs, test(LARGE, permutation.ROUNDS))) < LIMIT


@pytest.mark.parametrize("test", [inversions, runs, strides])
def test_two_rounds_are_found_wanting(test):
    assert max(map(abs, test(5000, 2))) > LIMIT


def test_all_orders_of_a_few_samples_come_alike():
    """5 samples have 120 orders; 12,000 seeds."""
    counts = dict.fromkeys(permutations(range(5)), 0)
    for seed in range(12_000):
        counts[tuple(shuffled(5, seed, 0)(np.arange(5)).tolist())] += 1
    assert abs(z_of_counts(np.array(list(counts.values())), np.full(120, 100.0))) < LIMIT


@pytest.mark.parametrize("size", [4097, 9000, 1 << 20, 10**9 + 7, 1 << 40])
def test_a_python_without_numpy_has_the_same_order(size: int) -> None:
    """A task in a container goes on where the same run outside has stopped."""
    places = [0, 1, size // 3, size - 2, size - 1]
    ours = Permutation(size, 3, 2)(np.array(places)).tolist()
    assert ours == list(map(PlainPermutation(size, 3, 2), places))
