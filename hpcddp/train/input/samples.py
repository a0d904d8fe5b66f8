"""Samples whose random numbers follow only from the job's seed, the epoch and their index.

The numbers that ``__getitem__`` draws from torch's default generator, from ``random`` and from
``numpy.random`` are the same in every worker process, on every rank and world size, and after every
resume. One number holds the epoch and the index, since persistent workers receive nothing else.

Seeding costs time, so a generator is seeded only after a dataset has drawn from it. If a generator
has changed after a batch was read, the batch is read again with that generator seeded for each
sample, as for all later batches. A process reads a batch again at most three times.

A dataset's own ``__getitems__`` gets whole batches until it draws a number; after that it gets
lists of one index, because numbers drawn for a whole batch depend on its other samples. A dataset
with a method ``prefetch`` gets the indices of all coming samples, and an empty list when it can
forget them. Generators of the dataset itself are not handled: it must seed them by the index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from hpcddp.train.input.seeding import Generators, seed_sample


class Samples(Dataset[Any]):
    """A dataset indexed by ``epoch * size + index``; it leaves the process's generators unchanged.

    Args:
        dataset: has __len__, and __getitem__ or __getitems__.
        seed: seeds the random numbers, together with epoch and index.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._size = len(dataset)
        self._drawn: set[str] = set()  # the generators that the dataset draws from

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, code: int) -> Any:
        return self.__getitems__([code])[0]

    def __getitems__(self, codes: list[int]) -> list[Any]:
        """The samples of one batch; a DataLoader calls this once per batch."""
        before = Generators()
        prefetch = prefetch_of(self._dataset) or _nothing
        prefetch([code % self._size for code in codes])
        try:
            samples = self._draw(codes)
            while new := before.moved(besides=self._drawn):
                self._drawn |= new
                samples = self._draw(codes)
        finally:
            prefetch([])
        before.restore(self._drawn)
        return samples

    def _draw(self, codes: list[int]) -> list[Any]:
        """The samples; generators in use are seeded for each one."""
        if not self._drawn:
            return self._read([code % self._size for code in codes])
        samples = []
        for code in codes:
            epoch, index = divmod(code, self._size)
            seed_sample(self._drawn, self._seed, epoch, index)
            samples += self._read([index])
        return samples

    def _read(self, indices: list[int]) -> list[Any]:
        whole = getattr(self._dataset, "__getitems__", None)
        if whole:
            samples: list[Any] = whole(indices)
            return samples
        return [self._dataset[index] for index in indices]


def prefetch_of(dataset: Any) -> Callable[[list[int]], object] | None:
    """A dataset's method to fetch samples ahead, or None."""
    method = getattr(dataset, "prefetch", None)
    return method if callable(method) else None


def _nothing(indices: list[int]) -> None:
    """The method of a dataset that does not fetch ahead."""
