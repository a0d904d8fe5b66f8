"""Samples whose random numbers follow from the job's seed, the epoch and their index alone.

What ``__getitem__`` draws from torch's default generator, from ``random`` and from ``numpy.random``
is the same in every worker process, on every rank and world size, and after every resume. The epoch
comes with the index, in one number, since persistent workers hear of nothing else.

Seeding costs time, so a generator is seeded only after a dataset was seen to draw from it: a batch
is read, and if one has moved, it is read again with that one seeded for each sample, and so are all
later batches. A batch is read again three times in a process at most.

A dataset's own ``__getitems__`` gets whole batches as long as it draws nothing; after that it gets
lists of one index, because the numbers drawn for a whole batch depend on its other samples. A
dataset with a method ``prefetch`` gets the indices of all coming samples, and an empty list when it
may forget them. Generators that a dataset keeps for itself are not seen here: it has to seed
them by the index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from hpcddp.train.input.seeding import Generators, seed_sample


class Samples(Dataset[Any]):
    """A dataset by ``epoch * size + index``; the generators of this process stay as they are.

    Args:
        dataset: with __len__ and __getitem__ or __getitems__.
        seed: of the random numbers, together with epoch and index.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._size = len(dataset)
        self._drawn: set[str] = set()  # the generators that it draws from

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, code: int) -> Any:
        return self.__getitems__([code])[0]

    def __getitems__(self, codes: list[int]) -> list[Any]:
        """The samples of one batch; a DataLoader calls this once for it."""
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
        """The samples; the generators known to be drawn from are seeded for each."""
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
    """A dataset's method that fetches ahead; None without. A number of that name is its own."""
    method = getattr(dataset, "prefetch", None)
    return method if callable(method) else None


def _nothing(indices: list[int]) -> None:
    """Stands for the method of a dataset that fetches nothing ahead."""
