"""The values of a training record, collected without waiting for the device between two records.

With short steps, ``add_up`` and ``read`` are a step apart: the sums travel while the ranks compute.
Each rank's own figures (timing.py) travel with them, in a slot where the other ranks add 0.

With ``train.measure`` a record also has ``memory``, the bytes by purpose, each of the rank that
holds most (memory_use.py), and ``sent``, the bytes of a step over all ranks (traffic.py). Records,
evaluations and saves do not count as sent; votes on stopping do, some hundred bytes each.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.train.checkpoint.snapshot import Live
from hpcddp.train.memory_use import PARTS, MemoryUse
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.monitor.traffic import Traffic
from hpcddp.train.rank.readout import Readout
from hpcddp.train.rank.world import World

OWN = 8  # the most numbers of a record beside those of each rank
KEPT = 1024  # losses of micro-batches that are kept before they are merged into one


class _Sums(NamedTuple):
    """The sums up to a record."""

    # Sum of losses, flag for bad numbers, samples with a loss and without, bytes sent; over all
    # ranks once works are done. Then the figures of each rank.
    totals: Tensor
    most: Tensor  # bytes held by purpose, of the rank that holds most
    works: list[dist.Work | None]
    steps: int
    seconds: float
    lr: float
    norm: Tensor | None


class Meter:
    """Loss, learning rate, gradient norm and speed since the last record.

    ``ranks`` has each rank's own figures of the last record.
    """

    def __init__(self, world: World, clock: Clock | None = None) -> None:
        self._world = world
        self._clock = clock or Clock(world.device, whole=False)
        self._readout = Readout(world.device, OWN + world.size * self._clock.width)
        self.ranks: list[list[float]] = []
        self._losses: list[Tensor] = []  # of micro-batches
        self._samples: list[int] = []  # of each, on this rank
        self._mute = 0  # samples of micro-batches without a loss
        self._marked = 0  # micro-batches before this step
        self._steps = 0
        self._began = time.monotonic()
        self._sums: _Sums | None = None  # from add_up to read
        self.first = True
        self.lr = 0.0
        self.norm: Tensor | None = None
        self._gauge: MemoryUse | None = None
        self._wire: Traffic | None = None

    def measure(self, live: Live) -> None:
        """Record memory and sent bytes too, from now on."""
        self._gauge, self._wire = MemoryUse(live, self._world.device), Traffic(self._world.backend)

    def add(self, loss: Tensor | None, samples: int) -> None:
        """Count a micro-batch: its mean loss, if any, and its samples."""
        if loss is None:
            self._mute += samples
            return
        self._losses.append(loss)
        self._samples.append(samples)

    def _total(self) -> Tensor:
        """This rank's sum of losses over samples."""
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=self._world.device)
        losses = [loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in self._losses]
        return torch.stack(torch._foreach_mul(losses, self._samples)).sum()

    def step(self, lr: float, norm: Tensor | None) -> None:
        """Count an optimizer step with its learning rate and gradient norm; the gradients must
        still exist."""
        self._steps += 1
        if self._gauge:
            self._gauge.look()
        self.lr, self.norm = lr, norm
        if len(self._losses) > KEPT:
            total, samples = self._total(), sum(self._samples)
            self._losses, self._samples = [total / max(1, samples)], [samples]

    def mark(self) -> None:
        """Mark the start of a step that may be skipped."""
        self._marked = len(self._losses)

    def drop(self) -> None:
        """Drop the marked step; its time counts."""
        del self._losses[self._marked :], self._samples[self._marked :]
        self._steps += 1

    def add_up(self, bad: Tensor) -> None:
        """Start the sums over the ranks, and a new count; a collective.

        Args:
            bad: 1 on the device if this rank has bad numbers.
        """
        loss = self._total()
        counts = [sum(self._samples), self._mute, *([self._wire.take()] if self._wire else [])]
        # A rank without a loss does not know its precision: all ranks sum in float64.
        measured = torch.stack((loss.double(), bad.double()))
        seconds = max(time.monotonic() - self._began, 1e-9)
        totals = torch.cat((measured, self._sent(counts + self._own(seconds))))
        most = self._sent(self._gauge.read() if self._gauge else [])
        works = [self._reduce(totals, dist.ReduceOp.SUM), self._reduce(most, dist.ReduceOp.MAX)]
        sums = _Sums(totals, most, works, self._steps, seconds, self.lr, self.norm)
        self.reset()
        self._sums = sums

    def _own(self, seconds: float) -> list[float]:
        """This rank's figures in its slot, zeros elsewhere."""
        rank, width = self._world.rank.world_rank, self._clock.width
        figures = [0.0] * (self._world.size * width)
        figures[rank * width : (rank + 1) * width] = self._clock.take(self._steps, seconds)
        return figures

    def _sent(self, values: list[Any]) -> Tensor:
        """The numbers, copied to the device from pinned memory: from other memory the host would
        wait for the copy."""
        pinned = self._world.device.type == "cuda"
        tensor = torch.tensor(values, dtype=torch.float64, pin_memory=pinned)
        return tensor.to(self._world.device, non_blocking=True)

    def _reduce(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> dist.Work | None:
        several = self._world.size > 1 and values.numel() > 0
        return dist.all_reduce(values, how, async_op=True) if several else None

    def read(self) -> tuple[dict[str, Any], bool]:
        """The record's values over all ranks, and whether any rank had bad numbers.

        The values are empty if all steps were skipped, and have no loss if no step had one.
        """
        sums, self._sums = self._sums, None
        assert sums
        for work in filter(None, sums.works):
            work.wait()
        loss, bad, samples, mute, *rest = self._readout.numbers(sums.totals)
        width = self._clock.width
        first = len(rest) - self._world.size * width
        sent = rest[:first]
        self.ranks = [rest[i : i + width] for i in range(first, len(rest), width)]
        if not samples + mute:
            return {}, bool(bad)
        values: dict[str, Any] = {
            **({"loss": loss / samples} if samples else {}),
            **({} if math.isnan(sums.lr) else {"lr": sums.lr}),
            "samples_per_s": (samples + mute) / sums.seconds,
            "step_s": sums.seconds / sums.steps,
            **({"first": True} if self.first else {}),
        }
        waits = [figures[0] for figures in self.ranks if not math.isnan(figures[0])]
        if waits:
            values["wait_s"] = max(waits)
        if sums.norm is not None:
            values["grad_norm"] = float(sums.norm)
        if sent:
            most = map(_known, self._readout.numbers(sums.most))
            values["memory"] = dict(zip(PARTS, most, strict=True))
            values["sent"] = _known(sent[0] / sums.steps)
        self.first = False
        return values, bool(bad)

    def reset(self) -> None:
        """Forget what was counted."""
        if self._wire:
            self._wire.forget()
        self._clock.forget()
        self._losses, self._samples, self._marked, self._mute = [], [], 0, 0
        self._steps, self._sums = 0, None
        self._began = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time and the sent bytes within from those of the steps."""
        began = time.monotonic()
        with self._wire.paused() if self._wire else contextlib.nullcontext():
            yield
        self._began += time.monotonic() - began


def _known(value: float) -> int | None:
    """Whole bytes; None if a rank does not know them."""
    return round(value) if math.isfinite(value) else None
