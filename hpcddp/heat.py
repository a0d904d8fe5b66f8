"""Which rank was slow when: the figures of all ranks over time, in few columns."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from hpcddp.curves import pieces
from hpcddp.rundir import RunDir

COLUMNS = 120  # at most


class Heat:
    """How slow each rank was over time, in few columns, and the newest figures of each."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.newest: dict[str, Any] = {}
        self.steps: list[int] = []
        self._columns: list[list[float | None]] = []
        self._each = 1  # lines that make a column
        self._count = 0
        self._read: dict[int, int] = {}

    def update(self) -> None:
        """Read what is new."""
        for attempt in self.run.all_attempts():
            for data in pieces(attempt.ranks, self._read.get(attempt.number, 0)):
                self._read[attempt.number] = self._read.get(attempt.number, 0) + len(data)
                for text in data.splitlines():
                    self._take(text)

    def _take(self, text: bytes) -> None:
        try:
            told = msgspec.json.decode(text)
            step, ratios = int(told["step"]), _ratios(told)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
            return
        self.newest = told
        while self.steps and self.steps[-1] >= step:  # it was taken again
            del self.steps[-1], self._columns[-1]
        self._count += 1
        if self._count % self._each and self._columns:
            return
        self.steps.append(step)
        self._columns.append(ratios)
        if len(self._columns) > COLUMNS:
            self._each *= 2
            del self._columns[1::2], self.steps[1::2]

    def rows(self) -> list[list[float | None]]:
        """By rank, for each of ``steps``; None where the rank did not tell."""
        size = max(map(len, self._columns), default=0)
        return [[c[r] if r < len(c) else None for c in self._columns] for r in range(size)]


def _ratios(told: dict[str, Any]) -> list[float | None]:
    """Each rank's own work and wait, beside the median of all."""
    busy, wait = told.get("busy_s") or [], told.get("wait_s") or []
    own = [
        None if b is None and w is None else (b or 0.0) + (w or 0.0)
        for b, w in zip(busy, wait, strict=True)
    ]
    known = [value for value in own if value is not None]
    middle = statistics.median(known) if known else 0.0
    return [None if value is None or not middle else round(value / middle, 2) for value in own]
