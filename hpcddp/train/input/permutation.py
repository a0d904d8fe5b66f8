"""A shuffled order that is computed, not stored: any position in constant time and memory.

Above ``SMALL`` samples it is a Feistel network, the construction that makes a permutation of any
function (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
functions", 1988), over pairs (high, low) as in the generalised network of Black and Rogaway
("Ciphers with arbitrary finite domains", 2002): the halves change in turn by a hash of the other
one. There are a few more pairs than samples; a position that maps to a pair beyond the samples is
mapped again until it does not (their cycle walking), so the result is a permutation.

It shuffles well by the tests in test_permutation.py; it is not secure against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpcddp.train.input.plain_order import ROUNDS, SMALL

Order = Callable[[NDArray[np.int64]], NDArray[Any]]
"""Maps positions of an epoch to sample indices; both are integers of shape [n]."""


def shuffled(size: int, seed: int, epoch: int) -> Order:
    """The order of an epoch of ``size`` samples.

    Up to ``SMALL`` samples it is the order of DistributedSampler (Fisher and Yates' shuffle).
    """
    if size > SMALL:
        return Permutation(size, seed, epoch)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(size, generator=generator).numpy().take


class Permutation:
    """A pseudo-random permutation of range(size), chosen by seed and epoch.

    Args:
        size: up to 2**62. The pairs are rows of 2**bits: the low half changes by XOR, which needs
            no reduction, and the high half by addition modulo the number of rows. That number is
            even, since with an odd one all permutations would be even ones.
        rounds: number of rounds of the network.
    """

    def __init__(self, size: int, seed: int, epoch: int, rounds: int = ROUNDS) -> None:
        self.size = size
        bits = max(1, (size - 1).bit_length() // 2)
        rows = 2 * -(-size >> bits + 1)
        # A number below 2**half times the rows must not overflow.
        self._type: Any = np.uint32 if rows <= 1 << 16 else np.uint64
        width = 8 * np.dtype(self._type).itemsize
        self._bits, self._rows = self._type(bits), self._type(rows)
        self._mask = self._type((1 << bits) - 1)
        self._half, self._top = self._type(width // 2), self._type(width - bits)
        text = f"{size} {seed} {epoch}".encode()
        digest = hashlib.shake_256(text).digest(width // 4 * rounds)
        keys: NDArray[Any] = np.frombuffer(digest, self._type)
        self._keys = list(zip(keys[0::2] | self._type(1), keys[1::2], strict=True))

    def __call__(self, positions: NDArray[Any]) -> NDArray[Any]:
        """The indices at these positions of range(size); shape [n] to shape [n]."""
        indices = self._network(positions.astype(self._type))
        over = np.flatnonzero(indices >= self.size)
        while over.size:
            again = self._network(indices[over])
            indices[over] = again
            over = over[again >= self.size]
        return indices

    def _network(self, pairs: NDArray[Any]) -> NDArray[Any]:
        """Apply all rounds; each pair is one number."""
        high, low = pairs >> self._bits, pairs & self._mask
        mixed = np.empty_like(pairs)
        for number, (factor, summand) in enumerate(self._keys):
            if number % 2 == 0:
                _hash(low, factor, summand, mixed)
                mixed >>= self._half
                mixed *= self._rows
                mixed >>= self._half  # a number below rows
                high += mixed
                np.subtract(high, self._rows, out=mixed)  # wraps around where high is below rows
                np.minimum(high, mixed, out=high)
            else:
                _hash(high, factor, summand, mixed)
                mixed >>= self._top
                low ^= mixed
        high <<= self._bits
        high |= low
        return high


def _hash(values: NDArray[Any], factor: Any, summand: Any, out: NDArray[Any]) -> None:
    """A hash with a good upper half, by multiplication and squaring modulo the word size."""
    np.multiply(values, factor, out=out)
    out += summand
    out *= out
