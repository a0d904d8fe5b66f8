"""Where the time of one rank's steps goes: to its data, its own work, and the rest.

Its own work is the forward pass of its part of the model. In a backward pass ranks wait for one
another, and so they do in a forward pass that gathers parameters (fsdp, tp) or statistics
(SyncBatchNorm): there it is unknown. On a GPU a rank waits for its data while the GPU has nothing
to do, and not while the host, which is ahead of it, asks. Nothing here waits for the device.
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

PAIRS = 64  # of events that a GPU has not come to yet: what begins then is not timed
DIGITS = 7  # behind the point that tell something
LOOK_SECONDS = 5.0  # between two questions to a GPU's driver
STATM, PAGE = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")


class RankFigures(NamedTuple):
    """Of one rank, means over the steps since the last record; nan is unknown."""

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
        self._wait, self._reads, self._samples = _watch(device), False, 0
        self._busy: _Cpu | _Cuda | None = None
        self._use = _Use(device)

    @property
    def width(self) -> int:
        """How many figures ``take`` gives; the same on all ranks."""
        return len(RankFigures._fields) if self._whole else 1

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Count these modules' forward passes as this rank's work, where they are."""
        modules = list(modules)
        if self._whole and all(map(_alone, modules)):
            self._busy = _watch(self._device)
            for module in modules:
                inner: Any = module._compiled_call_impl or module._call_impl
                module._compiled_call_impl = _Timed(inner, self._busy)

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """These batches; the time until each is there counts."""
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
        """So many samples go through the model."""
        self._samples += samples

    def take(self, steps: int, seconds: float) -> list[float]:
        """The figures, in the order of ``RankFigures``; ``forget`` counts afresh.

        Args:
            steps: since the last time, in so many seconds.
        """
        figures = [self._wait.take() / steps if self._reads else math.nan]
        if self._whole:
            busy = self._busy.take() / steps if self._busy and self._busy.calls else math.nan
            speed = self._samples / seconds
            figures += [seconds / steps, busy, speed, _memory(self._device), self._use.look()]
        return [round(value, DIGITS) for value in figures]  # here, and not at rank 0 for all

    def forget(self) -> None:
        """Count afresh."""
        self._samples = 0
        self._wait.forget()
        if self._busy:
            self._busy.forget()


def _alone(module: nn.Module) -> bool:
    """Whether a module's forward pass waits for no other rank."""
    parts = any(hasattr(p, "to_local") for p in module.parameters())  # divided: DTensors
    return not parts and not any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())


class _Timed:
    """A module's call, timed where it trains.

    It stands where torch.compile puts its own: between what torch puts around a module and the
    module, so that DDP, which shares buffers first, is outside; and in no copy of the module, no
    file of it, and nothing that is compiled or scripted of it.
    """

    def __init__(self, call: Callable[..., Any], watch: _Cpu | _Cuda) -> None:
        self._call, self._watch = call, watch

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # an evaluation's
            return self._call(*args, **options)
        self._watch.start()
        result = self._call(*args, **options)
        self._watch.stop()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """None, for the few modules that copy it."""
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
    """The same on a GPU: from when it has done what was asked before a start, by events that are
    read when they are over. The last before a record may count in the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._passes: list[float] = []  # seconds of each
        self.calls = 0

    def start(self) -> None:
        self._begun = None
        if torch.cuda.is_current_stream_capturing():  # into a graph, which does not run now
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
        """Read the events that the GPU has come to."""
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
    """How busy a GPU is, as its driver says, asked for now and then; nan without an answer.

    Args:
        ask: the percent of the time that a device has worked of late.
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
        except ModuleNotFoundError:  # what torch asks the driver with
            self._device, self._last = None, math.nan
        except Exception:  # no answer this time
            self._last = math.nan
        self._next = time.monotonic() + LOOK_SECONDS
        return self._last
