"""Samples draw the same random numbers wherever and whenever they are read."""

import random

import numpy as np
import pytest
import torch
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from hpcddp.spec import DataSpec, JobSpec
from hpcddp.topology import Rank
from hpcddp.train.input.batches import TrainData
from hpcddp.train.input.samples import Samples
from hpcddp.train.rank.spread import replicas
from hpcddp.train.rank.world import World

SIZE = 20


class Plain:
    """Draws nothing, and notes what it is asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.asked.append(index)
        return index


class Random(Plain):
    def __getitem__(self, index):
        return (
            super().__getitem__(index),
            torch.rand(2).tolist(),
            random.gauss(0, 1),
            np.random.normal(),
        )


class Rarely(Plain):
    """Draws for one sample only."""

    def __getitem__(self, index):
        return super().__getitem__(index), random.random() if index == 7 else 0


class Batched(Plain):
    """Reads whole batches."""

    draws = False

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [(index, torch.rand(1).item() if self.draws else 0) for index in indices]


def drawn(*codes, seed=0, dataset=Random):
    """Each code's sample, read in one batch."""
    return dict(zip(codes, Samples(dataset(), seed).__getitems__(list(codes)), strict=True))


def test_a_sample_is_the_same_in_any_company():
    together = drawn(*range(SIZE))
    torch.rand(5), random.random(), np.random.rand()
    samples = Samples(Random(), 0)
    for code in reversed(range(SIZE)):
        assert samples[code] == together[code]


def test_seed_epoch_and_index_all_count():
    values = [
        found[1:]
        for seed in (0, 1)
        for found in drawn(*range(3 * SIZE), seed=seed).values()
    ]  # fmt: skip
    for part in zip(*values, strict=True):
        assert len(set(map(str, part))) == 6 * SIZE
    assert drawn(2 * SIZE + 3)[2 * SIZE + 3][0] == 3


def test_what_is_drawn_once_in_a_while_is_exact_too():
    samples = Samples(Rarely(), 0)
    read = [samples.__getitems__([i, i + 1]) for i in range(0, SIZE, 2)]
    assert read[3][1] == samples[7] == drawn(7, dataset=Rarely)[7]
    assert read[3][1][1] > 0


def test_the_processs_own_generators_stay_as_they_are():
    for dataset in (Plain, Random, Rarely):
        samples = Samples(dataset(), 0)
        values = []
        for reading in (False, True):
            torch.manual_seed(1), random.seed(1), np.random.seed(1)
            random.gauss(0, 1), np.random.normal()  # each keeps a second one for later
            for codes in ([1, 7], [3]) if reading else ():
                samples.__getitems__(codes)
            values.append((torch.rand(1).item(), random.gauss(0, 1), np.random.normal()))
        assert values[0] == values[1]


def test_a_dataset_that_draws_nothing_is_read_once():
    dataset = Plain()
    samples = Samples(dataset, 0)
    assert samples.__getitems__([SIZE + 1, SIZE + 5]) + samples.__getitems__([8]) == [1, 5, 8]
    assert dataset.asked == [1, 5, 8]


def test_a_dataset_hears_what_it_will_be_asked_for_if_it_has_a_method_for_that():
    dataset = Plain()
    dataset.prefetch = 4  # a number of its own
    assert Samples(dataset, 0).__getitems__([1, 5]) == [1, 5]
    dataset.prefetch = dataset.asked.append
    assert Samples(dataset, 0).__getitems__([3]) == [3]
    assert dataset.asked == [1, 5, [3], 3, []]


def test_whole_batches_are_read_until_something_is_drawn():
    dataset = Batched()
    samples = Samples(dataset, 0)
    samples.__getitems__([4, 2])
    dataset.draws = True
    first = samples.__getitems__([1, 3])
    assert samples.__getitems__([3, 9])[0] == first[1]
    assert dataset.asked == [[4, 2], [1, 3], [1], [3], [3], [9]]


def test_workers_of_a_loader_draw_as_the_process_itself():
    samples = Samples(Random(), 3)
    found = [
        [
            row
            for batch in DataLoader(samples, 3, num_workers=workers, collate_fn=list)
            for row in batch
        ]
        for workers in (2, 0)
    ]
    assert found[0] == found[1] and len({row[2] for row in found[0]}) == SIZE


@pytest.mark.parametrize("workers", [0, 1])
def test_the_epoch_reaches_those_who_load(workers):
    """A worker lives longer than an epoch."""
    spec = JobSpec(global_batch=4, seed=3, data=DataSpec(workers=workers))
    world = World(Rank(0, 1, 0, 1, 0), torch.device("cpu"), "gloo", [], HashStore())
    data, samples = TrainData(Random(), spec, replicas(world)), Samples(Random(), 3)
    for epoch in (0, 1, 5):
        for ids, batch in data.batches(epoch, 8):
            assert batch[0].tolist() == ids
            assert batch[2].tolist() == [samples[epoch * SIZE + i][2] for i in ids]
