"""An order that keeps to a few shards at a time."""

import random
import tracemalloc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcddp.train.input.grouped import TOGETHER, GroupedOrder
from hpcddp.train.input.sampler import ResumableSampler

GROUPS = st.lists(
    st.one_of(st.integers(0, 6), st.integers(0, 6000)), min_size=1, max_size=30
).filter(sum)


class Sharded:
    def __init__(self, groups):
        self.groups = np.array(groups)

    def __len__(self):
        return int(self.groups.sum())


def order(groups, world=1, *, epoch=0, start=0, seed=3):
    """What all ranks together read, in order."""
    ranks = []
    for rank in range(world):
        sampler = ResumableSampler(Sharded(groups), world, rank, seed=seed)
        sampler.set_position(epoch, start)
        ranks.append(list(sampler))
    return [i for step in zip(*ranks, strict=True) for i in step]


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(0, 3), st.integers(1, 5), st.data())
def test_every_sample_once_the_same_on_any_world_and_from_anywhere(groups, epoch, world, data):
    size = sum(groups)
    whole = order(groups, epoch=epoch)
    assert sorted(whole) == list(range(size))
    start = data.draw(st.integers(0, size - 1))
    left = order(groups, world, epoch=epoch, start=start)
    assert left[: size - start] == whole[start:]
    assert len(left) - (size - start) < world


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 6))
def test_a_few_groups_are_read_to_their_end_before_others_are_begun(groups, together):
    size = sum(groups)
    found = GroupedOrder(np.array(groups), 1, 2, together)(np.arange(size))
    of = np.repeat(np.arange(len(groups)), groups)[found]
    seen, places = [], {}
    for at, group in enumerate(of.tolist()):
        places.setdefault(group, [at, at])[1] = at
    for first, last in places.values():
        seen.append(sum(a <= last and b >= first for a, b in places.values()))
    assert max(seen) <= together


def test_the_order_of_groups_and_of_samples_changes_with_the_epoch_and_the_seed():
    groups = [500] * 12
    orders = [order(groups), order(groups, epoch=1), order(groups, seed=4)]
    assert orders[0] == order(groups)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        same = np.mean(np.array(orders[one]) == np.array(orders[other]))
        assert same < 0.01
    first = [{i // 500 for i in found[: 500 * TOGETHER]} for found in orders]
    assert all(len(groups) == TOGETHER for groups in first) and first[0] != first[1]


def test_samples_of_groups_that_are_mixed_are_mixed_well():
    """A batch has of each of the shards about as many as chance gives."""
    counts = np.zeros(4)
    for epoch in range(50):
        found = GroupedOrder(np.array([1000] * 4), 0, epoch)(np.arange(64))
        counts += np.bincount(found // 1000, minlength=4)
    assert ((counts - 800) ** 2 / 800).sum() < 16.3  # chi square, 3 degrees of freedom, p = 0.001


OWN = {
    "names": ["a", "b", "c"],
    "sizes in a list": [3, 4],
    "a number of each sample": np.array([0, 0, 1, 1, 2, 2, 2]),
    "less than all": np.array([3, 3]),
    "below 0": np.array([9, -2]),
    "a table": np.array([[3, 4]]),
    "weights": np.array([3.5, 3.5]),
    "truth values": np.ones(7, bool),
    "a method": len,
}


@pytest.mark.parametrize("kind", OWN)
def test_groups_that_are_no_runs_of_all_samples_are_the_datasets_own_matter(kind):
    class Own:
        groups = OWN[kind]

        def __len__(self):
            return 7

    assert list(ResumableSampler(Own(), 1, 0)) == list(ResumableSampler(range(7), 1, 0))


def test_any_place_of_a_thousand_million_samples_takes_little_memory():
    sampler = ResumableSampler(Sharded([100_000] * 10_000), 8, 3, seed=1)
    tracemalloc.start()
    try:
        found = set()
        for start in random.Random(0).sample(range(10**9 - 10**6), 3):
            sampler.set_position(2, start)
            found |= set(islice(sampler, 20_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == 60_000 and peak < 30e6
