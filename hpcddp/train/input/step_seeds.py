"""Seeds of a script's own generators for each optimizer step.

What a rank draws then follows from the script's seeds, the rank and the step, and is not lost with
the rank. If the script seeds a generator itself, as at the start of an epoch, its seed counts from
then on: ranks that it has given the same numbers still have the same.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpcddp.train.input.seeding import digest, mix

SEEDING = ("seed", "setstate", "set_state")  # functions that give a generator a state
READING = ("getstate", "get_state")
READ = 1000  # states that are remembered: a script may read one for each sample of an evaluation


class _Twister:
    """The generator behind the functions of ``random`` or ``numpy.random``. They do not tell how it
    was seeded, so these functions note it.

    Args:
        module: with the functions.
        base: the number from which the seeds follow, if its state is not of a seed.
    """

    def __init__(self, module: Any, base: int | None = None) -> None:
        self._module, self._own = module, module.seed
        self._read = getattr(module, "getstate", None) or module.get_state
        self._base = self._state() if base is None else base
        self._noted = False  # the script has seeded it
        # States of this step that the script has read.
        self._ours: deque[int] = deque(maxlen=READ)

    def watch(self) -> None:
        """Note from now on when the script seeds it. To give it a state back that it had since our
        last seed is none."""
        for names, note in ((SEEDING, self._note), (READING, self._note_read)):
            for name in names:
                if hasattr(self._module, name):
                    setattr(self._module, name, _noted(self._module, name, note))

    def _note(self) -> None:
        self._noted = self._state() not in self._ours

    def _note_read(self) -> None:
        if not self._noted:
            self._ours.append(self._state())

    def seed(self, step: int) -> None:
        """Seed it for the step that follows this one."""
        if self._noted:
            self._base, self._noted = self._state(), False
        self._ours.clear()
        self._own(mix(self._base, step))

    def _state(self) -> int:
        """A number for the state now."""
        name_or_version, words, *rest = self._read()
        words = words.tobytes() if hasattr(words, "tobytes") else repr(words).encode()
        return zlib.crc32(words + repr((name_or_version, rest)).encode())


def _noted(module: Any, name: str, note: Callable[[], None]) -> Callable[..., Any]:
    """A module's function that also notes that it was called."""
    function = getattr(module, name)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note()
        return result

    # Pickled by these names, it is the module's own function in another process.
    noted.__module__, noted.__qualname__ = module.__name__, name
    return noted


class _Torch:
    """A generator of torch, which tells how it was seeded. That of a GPU need not be waited for."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.base = self._last = generator.initial_seed()

    def watch(self) -> None:
        """Take no seed until now for one of the script."""
        self._last = self._generator.initial_seed()

    def seed(self, step: int) -> None:
        """Seed it for the step that follows this one."""
        if (seed := self._generator.initial_seed()) != self._last:
            self.base = seed
        self._generator.manual_seed(int.from_bytes(digest((self.base, step))[:8], "big"))
        self._last = self._generator.initial_seed()


class StepSeeds:
    """The seeds of all default generators of this process.

    Args:
        generators: those of torch, the CPU's first.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._torch = [_Torch(generator) for generator in generators]
        self._python = _Twister(random)
        self._numpy = _Twister(numpy) if (numpy := _numpy()) else None

    def watch(self) -> None:
        """Note from now on when the script seeds a generator: what a checkpoint has restored until
        now is no seed of the script."""
        for generator in self._torch:
            generator.watch()
        for twister in filter(None, (self._python, self._numpy)):
            twister.watch()

    def seed(self, step: int) -> None:
        """Seed the default generators for the step that follows this one; 30 us."""
        for generator in self._torch:
            generator.seed(step)
        self._python.seed(step)
        if self._numpy is None and (numpy := _numpy()):
            rank = int(os.environ.get("RANK", "0"))  # each with its own numbers, as unseeded
            self._numpy = _Twister(numpy, mix(self._torch[0].base, rank))
            self._numpy.watch()
        if self._numpy:
            self._numpy.seed(step)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Those of torch for a training on a device."""
    generators = [torch.default_generator]
    if device.type == "cuda" and torch.cuda.is_initialized():  # before that, there are none
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


def _numpy() -> Any:
    return sys.modules.get("numpy.random")
