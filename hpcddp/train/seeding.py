"""Random numbers: seeds that follow from the job's, and the generators' states as tensors."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
from typing import Any

import torch
from torch import Tensor


def mix(*parts: int) -> int:
    """A seed of 32 bits from several numbers; near numbers give unrelated seeds."""
    return int.from_bytes(_digest(parts)[:4], "big")


def _digest(parts: tuple[int, ...]) -> bytes:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).digest()


def seed_all(seed: int) -> None:
    """Seed Python, NumPy (where it is imported), torch and the GPUs."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Generators:
    """The states of this process's default generators on the CPU, as they were.

    numpy.random counts only if somebody imported it.
    """

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = numpy.get_state() if numpy else None

    def moved(self) -> bool:
        """Whether anything was drawn since then."""
        now = Generators()
        return not (
            torch.equal(now._torch, self._torch)
            and now._python == self._python
            and _same(now._numpy, self._numpy)
        )

    def restore(self) -> None:
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def _same(a: Any, b: Any) -> bool:
    """Whether two states of NumPy's generator are: name, words, place, and a Gaussian kept."""
    if a is None or b is None:
        return a is b
    return bool(a[2:] == b[2:] and a[0] == b[0] and (a[1] == b[1]).all())


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the default generators on the CPU for one sample; unlike ``seed_all`` no GPU's."""
    first, second, third = struct.unpack_from(">IQI", _digest((seed, epoch, index)))
    torch.default_generator.manual_seed(first)
    random.seed(second)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(third)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """All generators' states of this process, as uint8 tensors: a checkpoint holds only tensors."""
    state = {"torch": torch.get_rng_state(), "python": _pack(random.getstate())}
    if "numpy" in sys.modules:
        _, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        state["numpy"] = _pack([keys.tolist(), *rest])
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Put back what ``rng_state`` gave."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = _unpack(state["python"])
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(("MT19937", *_unpack(state["numpy"])))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _pack(data: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)


def _unpack(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
