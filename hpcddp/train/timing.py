"""What the time of one rank's steps goes into: its data, its own work, and the rest.

Its own work is the forward pass of its part of the model. In a backward pass ranks wait for one
another, and so they do in a forward pass that gathers parameters (fsdp, tp) or statistics
(SyncBatchNorm): there nobody knows. Nothing here waits for the device.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

T = TypeVar("T")

PAIRS = 64  # of events on a GPU between two records: of so many forward passes the time is taken
DIGITS = 7  # behind the point that tell something
LOOK_SECONDS = 5.0  # between two questions to a GPU's driver
STATM, PAGE = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")


class Figures(NamedTuple):
    """Of one rank, means over the steps since the last record; nan is what nobody knows."""

    wait_s: float
    step_s: float = math.nan
    busy_s: float = math.nan
    samples_per_s: float = math.nan
    memory: float = math.nan  # bytes: resident on the CPU, the most so far on a GPU
    gpu: float = math.nan  # percent of the time


class Clock:
    """Counts between two records.

    Args:
        whole: not only the time in which the training waits for its data.
    """

    def __init__(self, device: torch.device, *, whole: bool = True) -> None:
        self._device, self._whole = device, whole
        self._wait, self._reads, self._samples = 0.0, False, 0
        self._busy: _Cpu | _Cuda | None = None
        self._use = _Use(device)

    @property
    def width(self) -> int:
        """How many figures ``take`` gives; the same on all ranks."""
        return len(Figures._fields) if self._whole else 1

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Count these modules' forward passes as this rank's work, where they are."""
        modules = list(modules)
        if self._whole and all(map(_alone, modules)):
            self._busy = _Cuda() if self._device.type == "cuda" else _Cpu()
            for module in modules:
                _hook(module, self._busy)

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """These batches; the time until each is there counts."""
        self._reads = True
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._wait += time.perf_counter() - began
            yield batch

    def count(self, samples: int) -> None:
        """So many samples go through the model."""
        self._samples += samples

    def take(self, steps: int, seconds: float) -> list[float]:
        """The figures, in the order of ``Figures``; ``forget`` counts afresh.

        Args:
            steps: since the last time, in so many seconds.
        """
        wait = self._wait / steps if self._reads else math.nan
        found = [wait]
        if self._whole:
            busy = self._busy.take() / steps if self._busy else math.nan
            speed = self._samples / seconds
            found += [seconds / steps, busy, speed, _memory(self._device), self._use.look()]
        return [round(value, DIGITS) for value in found]  # here, and not at rank 0 for all

    def forget(self) -> None:
        """Count afresh."""
        self._wait, self._samples = 0.0, 0
        if self._busy:
            self._busy.forget()


def _alone(module: nn.Module) -> bool:
    """Whether a module's forward pass waits for no other rank."""
    parts = any(hasattr(p, "to_local") for p in module.parameters())  # divided: DTensors
    return not parts and not any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())


def _hook(module: nn.Module, watch: _Cpu | _Cuda) -> None:
    """Between what torch puts around a module and the module: DDP, which shares buffers first,
    is outside. A compiled module's hooks would be compiled."""
    compiled: Callable[..., Any] | None = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        module.register_forward_pre_hook(lambda *_: watch.start())
        module.register_forward_hook(lambda *_: watch.stop())
        return

    def call(*args: Any, **options: Any) -> Any:
        watch.start()
        result = compiled(*args, **options)
        watch.stop()
        return result

    module._compiled_call_impl = call


class _Cpu:
    """Seconds in forward passes that train."""

    def __init__(self) -> None:
        self._began, self._total, self._calls = 0.0, 0.0, 0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        if torch.is_grad_enabled():  # else it is an evaluation's
            self._total += time.perf_counter() - self._began
            self._calls += 1

    def take(self) -> float:
        """Seconds since ``forget``; nan if there was no forward pass."""
        return self._total if self._calls else math.nan

    def forget(self) -> None:
        self._total, self._calls = 0.0, 0


class _Cuda:
    """The same on a GPU, by events that are read when they are over: the last passes before a
    record may count in the next one."""

    def __init__(self) -> None:
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._calls = 0

    def start(self) -> None:
        self._begun = None
        if len(self._pairs) < PAIRS and torch.is_grad_enabled():
            self._begun = self._spare.pop() if self._spare else (_event(), _event())
            self._begun[0].record()

    def stop(self) -> None:
        self._calls += torch.is_grad_enabled()
        if self._begun:
            self._begun[1].record()
            self._pairs.append(self._begun)
            self._begun = None

    def take(self) -> float:
        found = []
        while self._pairs and self._pairs[0][1].query():
            pair = self._pairs.popleft()
            found.append(pair[0].elapsed_time(pair[1]) / 1000)
            self._spare.append(pair)
        return sum(found) / len(found) * self._calls if found else math.nan

    def forget(self) -> None:
        self._calls = 0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        return float(int(STATM.read_bytes().split()[1]) * PAGE)
    except (OSError, IndexError, ValueError):  # not Linux
        return math.nan


class _Use:
    """How busy a GPU is, as its driver says, asked for now and then; nan where nobody says."""

    def __init__(self, device: torch.device) -> None:
        self._device: torch.device | None = device if device.type == "cuda" else None
        self._next, self._last = 0.0, math.nan

    def look(self) -> float:
        if self._device is None or time.monotonic() < self._next:
            return self._last
        try:
            self._last = float(torch.cuda.utilization(self._device))
        except Exception:  # no library for it, or a driver that does not answer
            self._device, self._last = None, math.nan
        self._next = time.monotonic() + LOOK_SECONDS
        return self._last
