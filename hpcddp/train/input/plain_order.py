"""The same orders as sampler.py's, one index at a time, for a Python without numpy.

permutation.py explains the network. An index takes some microseconds here, in place of nanoseconds.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator

import torch

SMALL = 4096  # samples; a network over few pairs is not uniform, and a table of them is small
ROUNDS = 6


def indices(positions: range, size: int, shuffle: tuple[int, int] | None) -> Iterator[int]:
    """The sample indices at these positions; those after the end wrap around.

    Args:
        size: number of samples.
        shuffle: seed and epoch of the order; None for that of the dataset.
    """
    order = _shuffled(size, *shuffle) if shuffle else int
    return (order(position % size) for position in positions)


def _shuffled(size: int, seed: int, epoch: int) -> Callable[[int], int]:
    if size > SMALL:
        return PlainPermutation(size, seed, epoch)
    generator = torch.Generator().manual_seed(seed + epoch)
    table: list[int] = torch.randperm(size, generator=generator).tolist()
    return table.__getitem__


class PlainPermutation:
    """``Permutation`` of permutation.py, of one position."""

    def __init__(self, size: int, seed: int, epoch: int, rounds: int = ROUNDS) -> None:
        self.size = size
        self._bits = max(1, (size - 1).bit_length() // 2)
        self._rows = 2 * -(-size >> self._bits + 1)
        self._width = 32 if self._rows <= 1 << 16 else 64
        length = self._width // 8
        digest = hashlib.shake_256(f"{size} {seed} {epoch}".encode()).digest(2 * length * rounds)
        keys = [int.from_bytes(digest[i : i + length], sys.byteorder)
                for i in range(0, len(digest), length)]  # fmt: skip
        self._keys = [(a | 1, b) for a, b in zip(keys[0::2], keys[1::2], strict=True)]

    def __call__(self, position: int) -> int:
        """The index at this position of range(size)."""
        index = self._network(position)
        while index >= self.size:
            index = self._network(index)
        return index

    def _network(self, pair: int) -> int:
        """Apply all rounds."""
        word, half = (1 << self._width) - 1, self._width // 2
        high, low = pair >> self._bits, pair & (1 << self._bits) - 1
        for number, (factor, summand) in enumerate(self._keys):
            mixed = ((low if number % 2 == 0 else high) * factor + summand & word) ** 2 & word
            if number % 2 == 0:
                high = (high + ((mixed >> half) * self._rows >> half)) % self._rows
            else:
                low ^= mixed >> self._width - self._bits
        return high << self._bits | low
