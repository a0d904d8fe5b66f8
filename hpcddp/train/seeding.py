"""Random numbers: seeds that follow from the job's, and the generators' states as tensors."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import Any

import torch
from torch import Tensor


def mix(*parts: int) -> int:
    """A seed of 32 bits from several numbers; near numbers give unrelated seeds."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")


def seed_all(seed: int) -> None:
    """Seed Python, NumPy (where it is imported), torch and the GPUs."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)


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
