"""Which rank reads which samples, from any place in an epoch and on any world size.

The epoch's order is one permutation for all ranks, and a rank takes every world-size-th index of
it. So the samples of an optimizer step depend on the position alone: samples [c, c + global batch)
of the order, however many ranks share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that starts after ``start`` samples of the epoch.

    Args:
        dataset: only its length is used.
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
        num_replicas: int,
        rank: int,
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
        self.multiple = multiple or num_replicas
        self.start = 0

    def set_position(self, epoch: int, start: int) -> None:
        """Go to the epoch, after ``start`` of its samples counted over all ranks."""
        self.set_epoch(epoch)
        self.start = start

    def __len__(self) -> int:
        left = len(self.dataset) - self.start  # type: ignore[arg-type]
        if self.drop_last:
            return left // self.multiple * self.multiple // self.num_replicas
        return -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        size: int = len(self.dataset)  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(size, generator=generator)
        else:
            order = torch.arange(size)
        stop = self.start + self.rank + len(self) * self.num_replicas
        positions = torch.arange(self.start + self.rank, stop, self.num_replicas)
        return iter(order[positions % size].tolist())
