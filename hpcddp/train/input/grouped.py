"""A shuffled order that uses a few groups of samples at a time, such as the shards of a store.

The groups are shuffled and used a few at a time; the samples of these few are shuffled together. So
a node needs only some shards at once, and an epoch still mixes neighbouring samples. Any position
of the order is computed on demand, from a few numbers for each group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcddp.train.input.permutation import Order, shuffled
from hpcddp.train.input.seeding import mix

TOGETHER = 4  # groups that are mixed at a time


class GroupedOrder:
    """The order of an epoch: an ``Order`` of permutation.py.

    Args:
        groups: sizes of consecutive runs of samples, together all samples.
        together: number of groups that are mixed.
    """

    def __init__(
        self, groups: NDArray[np.int64], seed: int, epoch: int, together: int = TOGETHER
    ) -> None:
        groups = np.asarray(groups, np.int64)
        order = shuffled(len(groups), mix(seed, epoch), 0)(np.arange(len(groups)))
        starts = np.cumsum(groups) - groups
        self._starts = starts[order]  # first sample of each group, in shuffled order
        self._ends = np.cumsum(groups[order])  # position in the order where each would end unmixed
        self._begins = self._ends - groups[order]
        self._mixed = np.append(self._begins[::together], self._ends[-1])
        self._seed = seed, epoch
        self._last: tuple[int, Order] | None = None

    def __call__(self, positions: NDArray[Any]) -> NDArray[Any]:
        """The indices at these positions of the order; shape [n] to shape [n]."""
        indices = np.empty(len(positions), np.int64)
        mixes = np.searchsorted(self._mixed, positions, "right") - 1
        for number in np.unique(mixes).tolist():
            chosen = np.flatnonzero(mixes == number)
            start = self._mixed[number]
            places = start + self._order(number)(positions[chosen] - start).astype(np.int64)
            group = np.searchsorted(self._ends, places, "right")
            indices[chosen] = self._starts[group] + places - self._begins[group]
        return indices

    def _order(self, number: int) -> Order:
        """The order within a set of mixed groups; the last one is cached for the next call."""
        if self._last is None or self._last[0] != number:
            size = int(self._mixed[number + 1] - self._mixed[number])
            self._last = number, shuffled(size, mix(*self._seed, number), 0)
        return self._last[1]
