"""Which rank reads which samples, from any place in an epoch and on any world size.

The epoch's order is one permutation for all ranks, and a rank takes every world-size-th index of
it. So the samples of an optimizer step depend on the position alone: samples [c, c + global batch)
of the order, however many ranks share them. The order is computed where it is needed (see
permutation.py): neither memory nor the time to the first index grows with the dataset. A dataset
that lies in shards says so by ``groups``, and the order keeps to a few of them at a time (see
grouped.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from hpcddp.train.input.grouped import GroupedOrder
from hpcddp.train.input.permutation import Order, shuffled

FIRST_CHUNK = 1 << 10  # indices computed at a time, in the beginning
CHUNK = 1 << 17  # indices that are computed at once afterwards


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that starts after ``start`` samples of the epoch, in constant memory.

    Its order is another one than torch's where there are more than ``permutation.SMALL`` samples.

    Args:
        dataset: its length is used, and its ``groups`` if it has them: sizes of consecutive runs of
            samples that are best read together, in an array of whole numbers. Whatever else has
            that name is the dataset's own matter.
        num_replicas: world size.
        rank: global rank.
        seed: of the order, together with the epoch.
        shuffle: a new order in every epoch (``set_epoch``).
        drop_last: leave out the tail that does not fill ``multiple``; else the tail is padded
            with the epoch's first samples until every rank has as many.
        multiple: samples of all ranks that belong together, the global batch.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        multiple: int | None = None,
    ) -> None:
        super().__init__(
            dataset,  # type: ignore[arg-type]
            num_replicas,
            rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self.multiple = multiple or self.num_replicas
        self.start = 0
        self.num_samples = len(self)
        self.total_size = self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Go to the epoch: to its beginning, unless it is the one where ``set_position`` went."""
        if epoch != self.epoch:
            self.set_position(epoch, 0)

    def set_position(self, epoch: int, start: int) -> None:
        """Go to the epoch, after ``start`` of its samples counted over all ranks."""
        super().set_epoch(epoch)
        self.start = start

    def __len__(self) -> int:
        left = len(self.dataset) - self.start  # type: ignore[arg-type]
        if self.drop_last:
            return left // self.multiple * self.multiple // self.num_replicas
        return -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        size: int = len(self.dataset)  # type: ignore[arg-type]
        first = self.start + self.rank
        positions = range(first, first + len(self) * self.num_replicas, self.num_replicas)
        order = self._order(size) if self.shuffle else None
        return chain.from_iterable(chunk.data for chunk in _chunks(positions, size, order))

    def _order(self, size: int) -> Order:
        groups = getattr(self.dataset, "groups", None)
        if _are_runs(groups, size):
            return GroupedOrder(groups, self.seed, self.epoch)
        return shuffled(size, self.seed, self.epoch)


def _are_runs(groups: Any, size: int) -> TypeGuard[NDArray[np.int64]]:
    """Whether these are sizes of consecutive runs of so many samples."""
    return (
        isinstance(groups, np.ndarray)
        and groups.ndim == 1
        and groups.dtype.kind in "iu"
        and bool((groups >= 0).all())
        and int(groups.sum()) == size
    )


def _chunks(positions: range, size: int, order: Order | None) -> Iterator[NDArray[Any]]:
    """The indices at these positions, in arrays; positions after the end begin anew."""
    done, length = 0, FIRST_CHUNK
    while some := positions[done : done + length]:
        places = np.arange(some.start, some.stop, some.step)
        if some[-1] >= size:
            places %= size
        yield places if order is None else order(places)
        done, length = done + length, CHUNK
