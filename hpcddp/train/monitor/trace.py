"""attempts/N/trace-R.jsonl: every step of rank R, one line each, with ``train.trace``.

    {"step": 7, "epoch": 0, "ids": [31, 4, 15, 9], "loss": 0.6931471805599453}

step counts from 1. ids are the samples of this rank in the step, in order, over all micro-batches
and without padding; those of all ranks together are the step's samples, each once. loss is their
mean, or null without samples. Of the ranks that work on the same samples, the first that computes
their loss lists them; the others list none. Reading the loss makes steps on a GPU slower.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from hpcddp.train.input.batches import Micro


class Trace:
    """Writes the trace of one rank; does nothing without a path."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = None
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        self._ids: list[int] = []
        self._losses: list[tuple[Tensor, int]] = []

    def add(self, ids: Sequence[int], micro: Micro, loss: Tensor) -> None:
        """Add a micro-batch: the sample indices, padding last, and their mean loss."""
        if self._file and micro.real:
            self._ids += ids[: micro.real]
            self._losses.append((loss.detach(), micro.real))

    def step(self, step: int, epoch: int) -> None:
        """Write and flush the line of a step."""
        if self._file:
            total = sum(loss.item() * real for loss, real in self._losses)
            mean = total / len(self._ids) if self._ids else None
            line = {"step": step, "epoch": epoch, "ids": self._ids, "loss": mean}
            with contextlib.suppress(OSError):  # a full disk loses lines and does not end the rank
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
            self._ids, self._losses = [], []

    def close(self) -> None:
        if self._file:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
