"""Assigns samples to ranks, from any position of an epoch and for any world size.

The epoch's order is one permutation for all ranks; a rank reads every world-size-th index of it. So
the samples of an optimizer step depend only on the position: samples [c, c + global batch) of the
order, whatever the number of ranks. The order is computed on demand (permutation.py): neither
memory nor the time to the first index grows with the dataset. A dataset in shards has ``groups``;
then the order reads a few shards at a time (grouped.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

from torch.utils.data import DistributedSampler

from hpcddp.train.input import plain_order

try:
    import numpy as np
except ImportError:  # in a container's image: torch does not require it
    NUMPY = False
else:
    NUMPY = True

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpcddp.train.input.permutation import Order

FIRST_CHUNK = 1 << 10  # indices in the first chunks
CHUNK = 1 << 17  # indices in later chunks


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that starts after ``start`` samples of the epoch, in constant memory.

    For more than ``permutation.SMALL`` samples, its order differs from torch's.

    Args:
        dataset: its length is used, and its ``groups`` if it has them: sizes of consecutive runs of
            samples that are best read together, as an integer array. An attribute ``groups`` of
            another form is ignored.
        num_replicas: world size.
        rank: global rank.
        seed: seeds the order, together with the epoch.
        shuffle: use a new order in every epoch (``set_epoch``).
        drop_last: drop the tail that does not fill ``multiple``; otherwise pad it with the epoch's
            first samples, so that all ranks have the same number.
        multiple: number of samples of all ranks in one step, the global batch.
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
        """Go to the start of the epoch, unless ``set_position`` has set a position in it."""
        if epoch != self.epoch:
            self.set_position(epoch, 0)

    def set_position(self, epoch: int, start: int) -> None:
        """Go to the position after ``start`` samples of the epoch, counted over all ranks."""
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
        if not NUMPY:
            shuffle = (self.seed, self.epoch) if self.shuffle else None
            return plain_order.indices(positions, size, shuffle)
        order = self._order(size) if self.shuffle else None
        return chain.from_iterable(chunk.data for chunk in _chunks(positions, size, order))

    def _order(self, size: int) -> Order:
        from hpcddp.train.input.grouped import GroupedOrder
        from hpcddp.train.input.permutation import shuffled

        groups = getattr(self.dataset, "groups", None)
        if _are_runs(groups, size):
            return GroupedOrder(groups, self.seed, self.epoch)
        return shuffled(size, self.seed, self.epoch)


def _are_runs(groups: Any, size: int) -> TypeGuard[NDArray[np.int64]]:
    """Whether these are sizes of consecutive runs of ``size`` samples."""
    return (
        isinstance(groups, np.ndarray)
        and groups.ndim == 1
        and groups.dtype.kind in "iu"
        and bool((groups >= 0).all())
        and int(groups.sum()) == size
    )


def _chunks(positions: range, size: int, order: Order | None) -> Iterator[NDArray[Any]]:
    """The indices at these positions, in arrays; positions after the end wrap around."""
    done, length = 0, FIRST_CHUNK
    while some := positions[done : done + length]:
        places = np.arange(some.start, some.stop, some.step)
        if some[-1] >= size:
            places %= size
        yield places if order is None else order(places)
        done, length = done + length, CHUNK
