"""Seeds of a script's own generators for each optimizer step.

What a rank draws then follows from the script's seeds, the rank and the step, and is not lost with
the rank. If the script seeds a generator itself, as at the start of an epoch, its seed counts from
then on: ranks that it has given the same numbers still have the same. Python and NumPy do not say
how they were seeded, so their state is compared with those that follow from the last seed of ours
(Matsumoto and Nishimura, 1998: each 624 numbers, all words of a Mersenne Twister change at once).
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from typing import Any

import torch

from hpcddp.train.input.seeding import HEAD, PYTHON, digest, mix

WORDS = 624  # of a Mersenne Twister, 4 bytes each
INDEX = 4  # bytes before the words in a Python generator: its position
TURNS = 1000  # times that a script uses up all words between two steps, at most


class _Python:
    """The generator behind ``random``'s functions."""

    def __init__(self) -> None:
        self.here: Any = random.Random()
        self.here.setstate(random.getstate())

    def follow(self, seed: int) -> None:
        """Take the state after this seed for the last one of ours."""
        self.here = random.Random(seed)

    @staticmethod
    def seed(seed: int) -> None:
        random.seed(seed)

    @staticmethod
    def words() -> bytes:
        """The state now."""
        return _memory(PYTHON)

    def ours(self) -> bytes:
        """The last known state of ours."""
        return _memory(self.here)

    def turn(self) -> None:
        """Use up all words of it."""
        self.here.getrandbits(32 * WORDS)


class _Numpy:
    """The generator behind NumPy's functions; only once NumPy is imported."""

    def __init__(self) -> None:
        self.here: Any = _numpy().RandomState()
        self.here.set_state(_numpy().get_state())

    def follow(self, seed: int) -> None:
        self.here = _numpy().RandomState(seed)

    @staticmethod
    def seed(seed: int) -> None:
        _numpy().seed(seed)

    @staticmethod
    def words() -> bytes:
        return bytes(_numpy().get_state(legacy=False)["state"]["key"].data)

    def ours(self) -> bytes:
        return bytes(self.here.get_state(legacy=False)["state"]["key"].data)

    def turn(self) -> None:
        self.here.bytes(4 * WORDS)


class _Twister:
    """One of them, and the number from which its seeds follow.

    Args:
        base: that number; by default its state.
    """

    def __init__(self, generator: _Python | _Numpy, base: int | None = None) -> None:
        self._generator = generator
        self._base = zlib.crc32(generator.words()) if base is None else base
        self._seeded: int | None = None  # the last seed of ours
        self._words = generator.words()  # just behind it

    def seed(self, step: int) -> None:
        """Seed it for the step that follows this one."""
        if (now := self._generator.words()) != self._words and not self._is_ours(now):
            self._base = zlib.crc32(now)
        self._seeded = mix(self._base, step)
        self._generator.seed(self._seeded)
        self._words = self._generator.words()

    def _is_ours(self, now: bytes) -> bool:
        """Whether a state follows from the last one of ours."""
        generator = self._generator
        if self._seeded is not None:
            generator.follow(self._seeded)
        for _ in range(TURNS):
            if generator.ours() == now:
                return True
            generator.turn()
        return False


class StepSeeds:
    """The seeds of all default generators of this process."""

    def __init__(self) -> None:
        self._torch = self._last = torch.initial_seed()
        self._python = _Twister(_Python())
        self._numpy = _Twister(_Numpy()) if _numpy() else None

    def settle(self) -> None:
        """Take the seed that torch has now, perhaps of a checkpoint, for none of the script."""
        self._last = torch.initial_seed()

    def seed(self, step: int, device: torch.device) -> None:
        """Seed the default generators for the step that follows this one; 60 us."""
        if torch.initial_seed() != self._last:
            self._torch = torch.initial_seed()
        first = int.from_bytes(digest((self._torch, step))[:8], "big")
        torch.default_generator.manual_seed(first)
        self._last = torch.initial_seed()
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(first)
        self._python.seed(step)
        if self._numpy is None and _numpy():
            self._numpy = _Twister(_Numpy(), 0)  # only now imported: its state is of no seed
        if self._numpy:
            self._numpy.seed(step)


def _memory(generator: Any) -> bytes:
    """The words of a generator of Python, from its memory: reading its state takes 20 us."""
    return ctypes.string_at(id(generator) + HEAD + INDEX, 4 * WORDS)


def _numpy() -> Any:
    return sys.modules.get("numpy.random")
