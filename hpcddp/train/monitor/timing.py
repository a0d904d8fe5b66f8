"""Measures how one rank spends the time of its steps: waiting for data, its own work, the rest.

Its own work is the forward pass of its part of the model. Ranks wait for one another in a backward
pass, and in a forward pass that gathers parameters (fsdp, tp) or statistics (SyncBatchNorm): there
the own work is unknown. On a GPU, waiting for data is the time in which the GPU is idle, not the
time in which the host, which is ahead, asks for data. Nothing here waits for the device.
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

PAIRS = 64  # most pairs of pending GPU events; further passes are not timed
DIGITS = 7  # decimal places of the figures
LOOK_SECONDS = 5.0  # between two queries to a GPU's driver
STATM, PAGE = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")


class RankFigures(NamedTuple):
    """Means of one rank over the steps since the last record; nan is unknown."""

    wait_s: float
    step_s: float = math.nan
    busy_s: float = math.nan
    samples_per_s: float = math.nan
    memory: float = math.nan  # bytes: resident on the CPU, the peak so far on a GPU
    gpu: float = math.nan  # percent of the time


class Clock:
    """Measures between two records.

    Args:
        whole: measure all figures, not only the time of waiting for data.
    """

    def __init__(self, device: torch.device, *, whole: bool = True) -> None:
        self._device, self._whole = device, whole
        self._wait, self._reads, self._samples = _watch(device), False, 0
        self._busy: _Cpu | _Cuda | None = None
        self._use = _Use(device)

    @property
    def width(self) -> int:
        """Number of figures of ``take``; the same on all ranks."""
        return len(RankFigures._fields) if self._whole else 1

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Count these modules' forward passes as this rank's work, unless they wait for others."""
        modules = list(modules)
        if self._whole and all(map(_alone, modules)):
            self._busy = _watch(self._device)
            for module in modules:
                inner: Any = module._compiled_call_impl or module._call_impl
                module._compiled_call_impl = _Timed(inner, self._busy)

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """Pass on the batches, and measure the time until each arrives."""
        self._reads = True
        while True:
            self._wait.start()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._wait.stop()
            yield batch

    def count(self, samples: int) -> None:
        """Count samples that go through the model."""
        self._samples += samples

    def take(self, steps: int, seconds: float) -> list[float]:
        """The figures, in the order of ``RankFigures``; ``forget`` restarts the count.

        Args:
            steps, seconds: those since ``forget``.
        """
        figures = [self._wait.take() / steps if self._reads else math.nan]
        if self._whole:
            busy = self._busy.take() / steps if self._busy and self._busy.calls else math.nan
            speed = self._samples / seconds
            figures += [seconds / steps, busy, speed, _memory(self._device), self._use.look()]
        return [round(value, DIGITS) for value in figures]  # here: rank 0 would round for all ranks

    def forget(self) -> None:
        """Restart the count."""
        self._samples = 0
        self._wait.forget()
        if self._busy:
            self._busy.forget()


def _alone(module: nn.Module) -> bool:
    """Whether a module's forward pass waits for no other rank."""
    parts = any(hasattr(p, "to_local") for p in module.parameters())  # divided: DTensors
    return not parts and not any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())


class _Timed:
    """A module's call, timed in training.

    It replaces the attribute that torch.compile uses, so it lies inside of DDP, which first shares
    buffers. It is not part of a copied, saved, compiled or scripted module.
    """

    def __init__(self, call: Callable[..., Any], watch: _Cpu | _Cuda) -> None:
        self._call, self._watch = call, watch

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # an evaluation
            return self._call(*args, **options)
        self._watch.start()
        result = self._call(*args, **options)
        self._watch.stop()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None, for the few modules that copy the attribute."""
        return getattr, (None, "", None)


class _Cpu:
    """Seconds between starts and stops."""

    def __init__(self) -> None:
        self._began, self._total, self.calls = 0.0, 0.0, 0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._total += time.perf_counter() - self._began
        self.calls += 1

    def take(self) -> float:
        """Seconds since ``forget``."""
        return self._total

    def forget(self) -> None:
        self._total, self.calls = 0.0, 0


class _Cuda:
    """The same on a GPU, from the end of earlier work to the end of the pass, by events that are
    read once complete. The last ones before a record may count in the next record."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._passes: list[float] = []  # seconds of each
        self.calls = 0

    def start(self) -> None:
        self._begun = None
        if torch.cuda.is_current_stream_capturing():  # a captured graph does not run now
            return
        if len(self._pairs) == PAIRS:
            self._read()
        if len(self._pairs) < PAIRS:
            self._begun = self._spare.pop() if self._spare else (_event(), _event())
            self._begun[0].record(torch.cuda.current_stream(self._device))

    def stop(self) -> None:
        self.calls += 1
        if self._begun:
            self._begun[1].record(torch.cuda.current_stream(self._device))
            self._pairs.append(self._begun)
            self._begun = None

    def _read(self) -> None:
        """Read the completed events."""
        while self._pairs and self._pairs[0][1].query():
            pair = self._pairs.popleft()
            self._passes.append(pair[0].elapsed_time(pair[1]) / 1000)
            self._spare.append(pair)

    def take(self) -> float:
        """Seconds since ``forget``; nan if none are known yet."""
        if not self.calls:
            return 0.0
        self._read()
        return sum(self._passes) / len(self._passes) * self.calls if self._passes else math.nan

    def forget(self) -> None:
        self._passes, self.calls = [], 0


def _watch(device: torch.device) -> _Cpu | _Cuda:
    return _Cuda(device) if device.type == "cuda" else _Cpu()


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
    """The utilisation of a GPU from its driver, queried every few seconds; nan without an answer.

    Args:
        ask: the percentage of the recent time in which a device was busy.
    """

    def __init__(
        self, device: torch.device, ask: Callable[[torch.device], float] = torch.cuda.utilization
    ) -> None:
        self._device: torch.device | None = device if device.type == "cuda" else None
        self._ask = ask
        self._next, self._last = 0.0, math.nan

    def look(self) -> float:
        if self._device is None or time.monotonic() < self._next:
            return self._last
        try:
            self._last = float(self._ask(self._device))
        except ModuleNotFoundError:  # the package that torch needs for it
            self._device, self._last = None, math.nan
        except Exception:  # no answer this time
            self._last = math.nan
        self._next = time.monotonic() + LOOK_SECONDS
        return self._last
