"""Shards of an epoch's order, beside torch's own DistributedSampler."""

import tracemalloc
from itertools import islice

import pytest
from torch.utils.data import DistributedSampler

from hpcddp.train.input import sampler
from hpcddp.train.input.plain_order import SMALL
from hpcddp.train.input.sampler import ResumableSampler


def indices(size, world, *, epoch=0, start=0, **options):
    """Every rank's indices."""
    found = []
    for rank in range(world):
        sampler = ResumableSampler(range(size), world, rank, **options)
        sampler.set_position(epoch, start)
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


def interleaved(shards):
    """The order in which the ranks together read."""
    return [i for step in zip(*shards, strict=True) for i in step]


@pytest.mark.parametrize("size", [1, 7, 103, 128])
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_whole_epoch_is_that_of_torch(size, world, shuffle, drop_last):
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": 5}
    theirs = []
    for rank in range(world):
        sampler = DistributedSampler(range(size), world, rank, **options)
        sampler.set_epoch(2)
        theirs.append(list(sampler))
    if drop_last and size < world:
        theirs = [[]] * world  # torch computes 0 samples and then slices by its own rules
    assert indices(size, world, epoch=2, **options) == theirs


def test_every_sample_once_in_an_order_that_changes_with_the_epoch():
    first, second = (interleaved(indices(104, 4, epoch=e)) for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(104))
    assert first != second


@pytest.mark.parametrize("start", [0, 8, 48, 96, 103])
def test_what_is_left_is_the_same_for_every_world_size(start):
    whole = interleaved(indices(104, 1))
    for world in (1, 2, 4, 8):
        left = interleaved(indices(104, world, start=start))
        assert left[: 104 - start] == whole[start:]
        assert len(left) - (104 - start) < world  # padding


def test_drop_last_leaves_out_what_does_not_fill_a_global_batch():
    shards = indices(103, 4, start=16, drop_last=True, multiple=16)
    assert [len(shard) for shard in shards] == [20] * 4  # 87 left: 5 batches of 16
    assert interleaved(shards) == interleaved(indices(103, 1))[16:96]


@pytest.mark.parametrize("size", [5001, 40_000])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_computed_order_is_shared_as_torch_shares_its_own(size, drop_last):
    whole = interleaved(indices(size, 1, seed=3, epoch=1))
    assert sorted(whole) == list(range(size))
    left = size // 7 * 7 if drop_last else -(-size // 7) * 7
    found = interleaved(indices(size, 7, seed=3, epoch=1, drop_last=drop_last))
    assert found == (whole + whole)[:left]


@pytest.mark.parametrize("start", [0, 1, 1023, 1024, 20_000, 39_999])
def test_any_place_of_a_computed_order_can_be_the_first(start):
    whole = interleaved(indices(40_000, 1))
    for world in (1, 2, 5):
        left = interleaved(indices(40_000, world, start=start))
        assert left[: 40_000 - start] == whole[start:]


def test_a_new_epoch_begins_at_its_beginning():
    sampler = ResumableSampler(range(100), 2, 0)
    assert (sampler.num_samples, sampler.total_size) == (50, 100)
    sampler.set_position(3, 40)
    sampler.set_epoch(3)  # as a loop over the epochs left calls it
    assert len(sampler) == len(list(sampler)) == 30
    sampler.set_epoch(4)
    assert len(sampler) == len(list(sampler)) == 50


def test_a_thousand_million_samples_take_no_memory():
    sampler = ResumableSampler(range(10**9), 8, 3, seed=1)
    tracemalloc.start()
    try:
        found = set()
        for start in (0, 123_456_789, 999_000_000):
            sampler.set_position(2, start)
            found |= set(islice(sampler, 20_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == 60_000 and all(0 <= i < 10**9 for i in found)
    assert peak < 20e6  # of which most is the set


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [10, SMALL + 90])
def test_without_numpy_the_samples_are_the_same(
    monkeypatch: pytest.MonkeyPatch, size: int, shuffle: bool
) -> None:
    made = ResumableSampler(range(size), 3, 1, seed=5, shuffle=shuffle, multiple=6)
    made.set_position(2, 4)
    indices = list(made)
    monkeypatch.setattr(sampler, "NUMPY", False)
    assert list(made) == indices and len(indices) == len(made)
