"""Shards of an epoch's order, beside torch's own DistributedSampler."""

import pytest
from torch.utils.data import DistributedSampler

from hpcddp.train.sampler import ResumableSampler


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
