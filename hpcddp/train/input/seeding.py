"""Random numbers: seeds that follow from the job's, and the generators' states as tensors."""

from __future__ import annotations

import _random
import contextlib
import ctypes
import hashlib
import json
import random
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor


def mix(*parts: int) -> int:
    """A seed of 32 bits from several numbers; near numbers give unrelated seeds."""
    return int.from_bytes(digest(parts)[:4], "big")


def digest(parts: tuple[int, ...]) -> bytes:
    """32 bytes from several numbers."""
    return hashlib.sha256(" ".join(map(str, parts)).encode()).digest()


def seed_all(seed: int) -> None:
    """Seed Python, NumPy (where it is imported), torch and the GPUs."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Generators:
    """The states of this process's default CPU generators at construction."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = _python_state()
        self._numpy = _numpy_state()

    def moved(self, besides: Collection[str]) -> set[str]:
        """The names of the generators that were used since then, except ``besides``."""
        return {name for name, same in _SAME.items() if name not in besides and not same(self)}

    def restore(self, names: Collection[str]) -> None:
        """Restore some of them."""
        if "torch" in names:
            torch.default_generator.set_state(self._torch)
        if "python" in names:
            random.setstate(self._python)
        if "numpy" in names and self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)

    def same_torch(self) -> bool:
        return torch.equal(torch.default_generator.get_state(), self._torch)

    def same_python(self) -> bool:
        now = _python_state()
        return now is self._python or bool(now == self._python)

    def same_numpy(self) -> bool:
        a, b = _numpy_state(), self._numpy
        if a is b or a is None or b is None:
            return a is b
        return bool(a[2:] == b[2:] and (a[1] == b[1]).all())


_SAME = {
    "torch": Generators.same_torch,
    "python": Generators.same_python,
    "numpy": Generators.same_numpy,
}
MT_BYTES = 624 * 4 + 4  # of a Mersenne Twister in memory: its words and the position
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]  # behind random's functions
_HEAD = object.__basicsize__
_known: dict[str, tuple[Any, Any]] = {}  # by generator: its words at the last read, and its state


def _state(name: str, words: Any, read: Callable[[], Any]) -> Any:
    """The state, read again if the words in memory have changed: comparing words takes 2 us,
    reading a state of Python or NumPy 20 us and more."""
    if name not in _known or _known[name][0] != words:
        _known[name] = words, read()
    return _known[name][1]


def _python_state() -> Any:
    """The result of random.getstate(). The C object's own part is the words and the position."""
    words = ctypes.string_at(id(_PYTHON) + _HEAD, _random.Random.__basicsize__ - _HEAD)
    return _state("python", (words, _PYTHON.gauss_next), random.getstate)


def _numpy_state() -> Any:
    """The result of numpy.random.get_state(); None if it is not imported, or replaced.

    Drawing a cached second Gaussian does not change the words, so a cached one is read again.
    """
    numpy = sys.modules.get("numpy.random")
    bits: Any = numpy.get_bit_generator() if numpy else None
    if numpy is None or type(bits) is not numpy.MT19937:
        return None
    if "numpy" in _known and _known["numpy"][1][3]:
        del _known["numpy"]
    words = ctypes.string_at(bits.ctypes.state_address, MT_BYTES)
    return _state("numpy", words, numpy.get_state)


def seed_sample(names: Collection[str], seed: int, epoch: int, index: int) -> None:
    """Seed some of the default generators for one sample; unlike ``seed_all``, not the GPU's."""
    first, second, third = struct.unpack_from(">IQI", digest((seed, epoch, index)))
    if "torch" in names:
        torch.default_generator.manual_seed(first)
    if "python" in names:
        random.seed(second)
    if "numpy" in names:
        sys.modules["numpy.random"].seed(third)


def seed_step(seed: int, stream: int, step: int, device: torch.device) -> None:
    """Seed the default generators for one optimizer step: what a rank draws follows from the step,
    so nothing of it is lost with the rank."""
    first, second, third = struct.unpack_from(">IQI", digest((seed, stream, step)))
    torch.default_generator.manual_seed(first)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(first)
    random.seed(second)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(third)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The states of all generators of this process, as uint8 tensors for a checkpoint."""
    state = {"torch": torch.get_rng_state(), "python": _pack(random.getstate())}
    if "numpy" in sys.modules:
        _, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        state["numpy"] = _pack([keys.tolist(), *rest])
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore the result of ``rng_state``."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = _unpack(state["python"])
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(("MT19937", *_unpack(state["numpy"])))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Restore all generators afterwards: numbers drawn within do not change later ones."""
    state = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


def _pack(data: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)


def _unpack(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
