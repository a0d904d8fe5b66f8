"""What a training record tells, gathered without waiting for the device between two records.

Where steps are short, ``add_up`` and ``read`` are a step apart: the sums travel while the ranks
compute.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.train.world import World

KEPT = 1024  # losses of micro-batches that are kept, before they become one


class _Sums(NamedTuple):
    """What was counted up to a record."""

    totals: Tensor  # loss over samples, samples, whether numbers are bad; of all ranks after work
    work: dist.Work | None
    steps: int
    seconds: float
    lr: float
    norm: Tensor | None


class Meter:
    """Loss, learning rate, gradient norm and speed since the last record."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._losses: list[Tensor] = []  # of micro-batches
        self._samples: list[int] = []  # of each, on this rank
        self._marked = 0  # micro-batches before this step
        self._steps = 0
        self._began = time.monotonic()
        self._sums: _Sums | None = None  # on their way
        self.first = True
        self.lr = 0.0
        self.norm: Tensor | None = None

    def add(self, loss: Tensor, samples: int) -> None:
        """Count a micro-batch: its mean loss and its samples."""
        self._losses.append(loss)
        self._samples.append(samples)

    def _total(self) -> Tensor:
        """This rank's sum over samples."""
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=self._world.device)
        losses = [loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in self._losses]
        return torch.stack(torch._foreach_mul(losses, self._samples)).sum()

    def step(self, lr: float, norm: Tensor | None) -> None:
        """Count an optimizer step, taken with this learning rate and gradient norm."""
        self._steps += 1
        self.lr, self.norm = lr, norm
        if len(self._losses) > KEPT:
            total, samples = self._total(), sum(self._samples)
            self._losses, self._samples = [total / max(1, samples)], [samples]

    def mark(self) -> None:
        """A step begins that may be left out."""
        self._marked = len(self._losses)

    def drop(self) -> None:
        """Leave the step out whose beginning was marked; its time counts."""
        del self._losses[self._marked :], self._samples[self._marked :]
        self._steps += 1

    def add_up(self, bad: Tensor) -> None:
        """Begin to add up over the ranks, and to count afresh; a collective.

        Args:
            bad: 1 if this rank met bad numbers, on the device.
        """
        loss = self._total()
        totals = torch.stack((loss, torch.full_like(loss, sum(self._samples)), bad.to(loss)))
        totals = totals.double()  # ranks of a pipeline without losses do not know their precision
        work = dist.all_reduce(totals, async_op=True) if self._world.size > 1 else None
        seconds = max(time.monotonic() - self._began, 1e-9)
        sums = _Sums(totals, work, self._steps, seconds, self.lr, self.norm)
        self.reset()
        self._sums = sums

    def read(self) -> tuple[dict[str, float], bool]:
        """What was added up: the record's values over all ranks, none if all steps were left out;
        and whether any rank met bad numbers."""
        sums, self._sums = self._sums, None
        assert sums
        if sums.work:
            sums.work.wait()
        loss, samples, bad = sums.totals.tolist()
        if not samples:
            return {}, bool(bad)
        values = {
            "loss": loss / samples,
            "lr": sums.lr,
            "samples_per_s": samples / sums.seconds,
            "step_s": sums.seconds / sums.steps,
        }
        if sums.norm is not None:
            values["grad_norm"] = float(sums.norm)
        self.first = False
        return values, bool(bad)

    def reset(self) -> None:
        """Forget what was counted."""
        self._losses, self._samples, self._marked = [], [], 0
        self._steps, self._sums = 0, None
        self._began = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave this time out of the steps' time."""
        began = time.monotonic()
        yield
        self._began += time.monotonic() - began
