"""Bytes that this rank holds, by purpose (``train.measure``)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcddp.train.checkpoint.snapshot import Live
from hpcddp.train.parallel.optim import own
from hpcddp.train.rank.spread import local

PARTS = ("parameters", "gradients", "optimizer", "buffers", "peak")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5), clear_refs


class MemoryUse:
    """The bytes of a rank's tensors, and the peak of its process above the level at construction:
    before the first step, without gradients, activations and, in a new run, the optimizer's
    state."""

    def __init__(self, live: Live, device: torch.device) -> None:
        self._live = live
        self._peak: _CudaPeak | _ProcessPeak = (
            _CudaPeak(device) if device.type == "cuda" else _ProcessPeak()
        )
        self._gradients = 0

    def look(self) -> None:
        """Measure the gradients after a step, while they still exist."""
        gradients = (p.grad for p in self._live.module.parameters() if p.grad is not None)
        self._gradients = max(self._gradients, held(gradients))

    def read(self) -> list[float]:
        """Bytes in the order of PARTS; inf if unknown."""
        module, state = self._live.module, own(self._live.optimizer).state
        values = (value for kept in state.values() for value in kept.values())
        return [
            held(module.parameters()),
            self._gradients,
            held(value for value in values if isinstance(value, Tensor)),
            held(module.buffers()),
            self._peak.read(),
        ]


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' memory; shared memory counts once."""
    pieces = (local(tensor.detach()).untyped_storage() for tensor in tensors)
    return sum({piece.data_ptr(): piece.nbytes() for piece in pieces}.values())


class _CudaPeak:
    """The peak of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    def read(self) -> float:
        return torch.cuda.max_memory_allocated(self._device) - self._before


class _ProcessPeak:
    """The peak of the process as Linux counts it, for tensors and all else. Mapped files, mostly
    libraries, do not count: they are loaded as they are used."""

    def __init__(self) -> None:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc returns freed memory
            ctypes.CDLL(None).malloc_trim(0)
        self._before = math.nan
        with contextlib.suppress(OSError, KeyError):
            CLEAR.write_text(RESET_PEAK)
            self._before = _status()["RssAnon"]

    def read(self) -> float:
        if math.isnan(self._before):  # not Linux, or a kernel without these counters
            return math.inf
        now = _status()
        return max(0, now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._before)


def _status() -> dict[str, int]:
    """This process's memory by /proc, in bytes."""
    rows: list[list[Any]] = [line.split() for line in STATUS.read_text().splitlines()]
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}
