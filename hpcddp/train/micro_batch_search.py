"""Finds the largest micro-batch that fits in memory, at the start (``train.find_micro_batch``).

A trial is a forward and a backward pass of real samples, with gradients and optimizer state in
memory as during training. All ranks try the same sizes together, without synchronising; a
micro-batch fits if it fits on all ranks. A size below one that fits is assumed to fit. Afterwards
random numbers, buffers, gradients and optimizer state are as before.

The result is saved in the checkpoints. An attempt with the same settings does not search again; an
attempt before the first checkpoint does.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpcddp.attempt.error_record import kind_of
from hpcddp.errors import JobFileError
from hpcddp.sizes import amount
from hpcddp.spec import JobSpec
from hpcddp.train.checkpoint.snapshot import Live
from hpcddp.train.input import seeding
from hpcddp.train.input.batches import Micro, TrainData
from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.parallel import model, optim_state
from hpcddp.train.rank.spread import Spread
from hpcddp.train.rank.task_module import Task


def settle(
    known: dict[str, Any],
    task: Task,
    spec: JobSpec,
    spread: Spread,
    data: TrainData,
    live: Live,
    record: Recorder,
) -> dict[str, Any]:
    """Divide the data into the largest micro-batches that fit; a collective.

    Args:
        known: the result in the checkpoint, or empty.

    Returns: the size and the settings for which it is valid, for the next checkpoint.

    Raises:
        JobFileError: on all ranks, if one sample does not fit on one of them.
    """
    train, share = spec.train, data.micro_batch * data.accumulation
    on = spread.world.gather(_device(spread.world.device))
    mesh, hook = str(spread.layout), spec.ddp.hook
    holds = [share, train.precision, train.recompute, train.compile, on, mesh, hook]
    if known.get("holds") != holds:
        size, tried = _search(_Tries(task, spec, spread, data, live), share)
        if not size:
            raise _nothing_fits(on)
        known = {"size": size, "holds": holds}
        record("micro_batch", size=size, accumulation=share // size, tried=tried)
    data.cut(known["size"])
    return known


def _device(device: torch.device) -> list[Any]:
    """A device's name and bytes."""
    if device.type != "cuda":
        return [device.type, 0]
    properties = torch.cuda.get_device_properties(device)
    return [properties.name, properties.total_memory]


def _search(fits: Callable[[int], bool], share: int) -> tuple[int, list[int]]:
    """The largest divisor that fits (0 for none), and the sizes tried: the whole share first, then
    by bisection."""
    tried: list[int] = []

    def fails(size: int) -> bool:
        tried.append(size)
        return not fits(size)

    if not fails(share):
        return share, tried
    sizes: Sequence[int] = [n for n in range(1, share) if share % n == 0]
    count = bisect_left(sizes, True, key=fails)
    return sizes[count - 1] if count else 0, tried


def _nothing_fits(devices: list[list[Any]]) -> JobFileError:
    name, size = min(devices, key=lambda device: device[1])
    memory = f"the {amount(size)} of {name}" if size else "memory"
    return JobFileError(
        f"a forward and backward pass of one sample does not fit into {memory}",
        where="train.find_micro_batch",
        hint="set train.recompute = true or train.precision = 'bf16', use a smaller model, or use "
        "fsdp with train.micro_batch in place of this key",
    )


class _Tries:
    """Tests whether a micro-batch of a size fits on all ranks; a collective."""

    def __init__(
        self, task: Task, spec: JobSpec, spread: Spread, data: TrainData, live: Live
    ) -> None:
        self._task, self._spec, self._data, self._live = task, spec, data, live
        self._world, self._ranks = spread.world, spread.layout.ddp
        self._model = (
            model.wrap(live.module, spec, spread) if spread.layout.threads else live.module
        )
        if any(isinstance(part, nn.SyncBatchNorm) for part in live.module.modules()):
            raise JobFileError(
                "does not work with SyncBatchNorm: ranks would wait for one that is out of memory",
                where="train.find_micro_batch",
                hint="set train.micro_batch instead",
            )
        batches = data.batches(0, 0)
        _, self._batch = next(batches)

    def __call__(self, size: int) -> bool:
        fits = True
        try:
            with self._as_in_training(adds=size < self._data.micro_batch * self._data.accumulation):
                self._pass(size)
        except Exception as error:
            if kind_of(error, stepped=True) != "oom":
                raise
            fits = False
        gc.collect()
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
        return all(self._world.gather(fits))

    def _pass(self, size: int) -> None:
        """Forward and backward."""
        inputs, targets = self._data.place(self._batch, Micro(self._data.micro_batch, size))
        with model.autocast(self._world.device, self._spec.train.precision):
            loss = self._task.loss(self._model(inputs), targets)
        loss.backward()

    @contextlib.contextmanager
    def _as_in_training(self, *, adds: bool) -> Iterator[None]:
        """Within, memory is as full as during a step; afterwards it is as before.

        Args:
            adds: gradients of several micro-batches are accumulated beside DDP's buckets.
        """
        module, live = self._live.module, self._live
        trained = [p for p in module.parameters() if p.requires_grad]
        before = [buffer.detach().clone() for buffer in module.buffers()]
        try:
            with seeding.untouched(self._world.device), optim_state.reserved(live.optimizer):
                for p in trained:
                    p.grad = torch.zeros_like(p)
                # PowerSGD's memory, and the buckets.
                more = bool(live.hook and live.hook.fits) + (adds and self._ranks > 1)
                _held = [torch.zeros_like(p) for p in trained for _ in range(more)]
                yield
        finally:
            for p in trained:
                p.grad = None
            with torch.no_grad():
                for buffer, value in zip(module.buffers(), before, strict=True):
                    buffer.copy_(value)
