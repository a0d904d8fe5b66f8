"""What a run has told, step by step over all attempts: each step once, its values together.

What a later attempt or a rollback took again stands in place of what was told of it before.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcddp.attempt.joblog import line
from hpcddp.observe.curves import NAMES, POINTS, pieces
from hpcddp.rundir import RunDir, parse_lines

Origin = tuple[int, int]  # attempt, and byte behind the record in its file: later ones are greater
NOWHERE: Origin = (0, 0)
WORDS = 50  # newest events that are told in words
EVENTS = ("slow", "recovered", "waiting", "skipped", "rollback", "diverged", "checkpoint_failed")


@dataclass
class Row:
    """The values of one step."""

    step: int
    time: float  # seconds since the epoch
    values: dict[str, float]
    origin: Origin  # of the newest record in it


class Rows:
    """The steps of a run, as far as they are written.

    Args:
        given: those up to here are known; they are not kept in memory.
        last: the last attempt that is told; later ones tell for themselves.
    """

    def __init__(self, run: RunDir, given: Origin = NOWHERE, last: float = float("inf")) -> None:
        self.run, self._last = run, last
        self.words: deque[str] = deque(maxlen=WORDS)
        self._read: dict[int, int] = {}  # attempt -> bytes
        self._rows: list[Row] = []  # the newest that was given, and those since
        self._given = given

    def new(self, *, over: bool = False) -> list[Row]:
        """The steps that are new, in order. One that is not after the last of those given before:
        the run has gone back.

        Args:
            over: nobody writes any more. Else the newest step is kept back: more may come of it.
        """
        for attempt in self.run.all_attempts():
            if attempt.number > self._last:
                break
            start = self._read.get(attempt.number, 0)
            for data in pieces(attempt.metrics, start):
                for text in data.splitlines(keepends=True):
                    start += len(text)
                    for record in parse_lines([text]):
                        self._take(record, (attempt.number, start))
            self._read[attempt.number] = start
        end = len(self._rows) if over else max(0, len(self._rows) - 1)
        found = [row for row in self._rows[:end] if row.origin > self._given]
        if found:
            self._given = max(row.origin for row in found)
        self._rows = self._rows[max(0, end - 1) :]
        return found

    def _take(self, record: Mapping[str, Any], origin: Origin) -> None:
        event, step = record.get("event"), record.get("step")
        if event in EVENTS:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self.words.append(line(record))
        if event == "rollback":
            step = record.get("to")
        if type(step) is not int or not 0 <= step < 2**63:
            return
        if event in ("start", "rollback"):
            self._cut(step)
        elif values := _values(record):
            self._add(Row(step, _number(record.get("time")) or 0.0, values, origin))

    def _add(self, row: Row) -> None:
        self._cut(row.step)
        if self._rows and self._rows[-1].step == row.step:
            row.values = self._rows.pop().values | row.values
        elif row.origin <= self._given:
            self._rows.clear()
        self._rows.append(row)

    def _cut(self, step: int) -> None:
        """Forget what comes after a step."""
        while self._rows and self._rows[-1].step > step:
            self._rows.pop()


def _values(record: Mapping[str, Any]) -> dict[str, float]:
    """What is a curve of a record, by the names that curves have elsewhere too."""
    event = record.get("event")
    if event == "train":
        found = {name: record.get(name) for name in NAMES}
    elif event in POINTS and isinstance(metrics := record.get("metrics"), dict):
        found = {f"{event}/{name}": value for name, value in metrics.items()}
    else:
        return {}
    return {name: x for name, value in found.items() if (x := _number(value)) is not None}


def _number(value: Any) -> float | None:
    """A number that may be none, or infinite; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
