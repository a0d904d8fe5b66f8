"""What a training record tells, gathered without waiting for the device between two records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.train.world import World


class Meter:
    """Loss, learning rate, gradient norm and speed since the last record."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loss = torch.zeros((), device=world.device)  # sum over this rank's samples
        self._samples = 0  # of this rank
        self._marked = self._loss, self._samples
        self._steps = 0
        self._began = time.monotonic()
        self.first = True
        self.lr = 0.0
        self.norm: Tensor | None = None

    def add(self, loss: Tensor, samples: int) -> None:
        """Count a micro-batch: its mean loss and its samples."""
        self._loss.add_(loss, alpha=samples)
        self._samples += samples

    def step(self, lr: float, norm: Tensor | None) -> None:
        """Count an optimizer step, taken with this learning rate and gradient norm."""
        self._steps += 1
        self.lr, self.norm = lr, norm

    def mark(self) -> None:
        """A step begins that may be left out."""
        self._marked = self._loss.clone(), self._samples

    def drop(self) -> None:
        """Leave the step out whose beginning was marked; its time counts."""
        loss, self._samples = self._marked
        self._loss.copy_(loss)
        self._steps += 1

    def read(self, bad: Tensor) -> tuple[dict[str, float], bool]:
        """The record's values over all ranks, and a fresh start; a collective.

        Args:
            bad: 1 if this rank met bad numbers, on the device.

        Returns: the values, none if all steps were left out; whether any rank met bad numbers.
        """
        totals = torch.stack(
            (self._loss, torch.full_like(self._loss, self._samples), bad.to(self._loss))
        )
        if self._world.size > 1:
            dist.all_reduce(totals)
        loss, samples, worst = totals.tolist()
        seconds = max(time.monotonic() - self._began, 1e-9)
        steps = self._steps
        self.reset()
        if not samples:
            return {}, bool(worst)
        values = {
            "loss": loss / samples,
            "lr": self.lr,
            "samples_per_s": samples / seconds,
            "step_s": seconds / steps,
        }
        if self.norm is not None:
            values["grad_norm"] = float(self.norm)
        self.first = False
        return values, bool(worst)

    def reset(self) -> None:
        """Forget what was counted."""
        self._loss.zero_()
        self._samples = self._steps = 0
        self._began = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave this time out of the steps' time."""
        began = time.monotonic()
        yield
        self._began += time.monotonic() - began
