"""The values of a run's metrics by step, over all attempts: each step once.

Where a later attempt or a rollback repeats a step, the new values replace the earlier ones.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcddp.attempt.joblog import line
from hpcddp.observe.curves import NAMES, POINTS, whole_lines
from hpcddp.rundir import RunDir, parse_lines

Origin = tuple[int, int]  # attempt, and the offset after the record in its file: both only grow
NOWHERE: Origin = (0, 0)
WORDS = 50  # newest events that are sent as text
EVENTS = ("slow", "recovered", "waiting", "skipped", "rollback", "diverged", "checkpoint_failed")


@dataclass
class StepValues:
    """The values of one step."""

    step: int
    time: float  # seconds since the epoch
    values: dict[str, float]
    origin: Origin  # of the step's newest record


class StepReader:
    """Reads the steps of a run, as far as they are written.

    Args:
        run: the run.
        given: steps up to this position are known, and are not returned.
        last: the last attempt to read; later attempts have their own process.
    """

    def __init__(self, run: RunDir, given: Origin = NOWHERE, last: float = float("inf")) -> None:
        self.run, self._last = run, last
        self.words: deque[str] = deque(maxlen=WORDS)
        self._read: dict[int, int] = {}  # attempt -> bytes
        self._steps: list[StepValues] = []  # the newest returned step, and those after it
        self._given = given

    @property
    def empty(self) -> bool:
        """Whether the run has no complete step yet."""
        return self._given == NOWHERE

    def new(self, *, over: bool = False) -> list[StepValues]:
        """Return the new steps, in order. A step that was returned before has been repeated.

        Args:
            over: the run has ended. Otherwise the newest step is kept back, because more of its
                values may follow.
        """
        for attempt in self.run.all_attempts():
            if attempt.number > self._last:
                break
            start = self._read.get(attempt.number, 0)
            for data in whole_lines(attempt.metrics, start):
                for text in data.splitlines(keepends=True):
                    start += len(text)
                    for record in parse_lines([text]):
                        self._take(record, (attempt.number, start))
            self._read[attempt.number] = start
        end = len(self._steps) if over else max(0, len(self._steps) - 1)
        new = [step for step in self._steps[:end] if step.origin > self._given]
        if new:
            self._given = max(step.origin for step in new)
        self._steps = self._steps[max(0, end - 1) :]
        return new

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
            self._add(StepValues(step, _number(record.get("time")) or 0.0, values, origin))

    def _add(self, step: StepValues) -> None:
        self._cut(step.step)
        if self._steps and self._steps[-1].step == step.step:
            step.values = self._steps.pop().values | step.values
        elif step.origin <= self._given:
            self._steps.clear()
        self._steps.append(step)

    def _cut(self, step: int) -> None:
        """Drop the steps after ``step``."""
        while self._steps and self._steps[-1].step > step:
            self._steps.pop()


def _values(record: Mapping[str, Any]) -> dict[str, float]:
    """The values of a record by the names of their curves."""
    event = record.get("event")
    if event == "train":
        values = {name: record.get(name) for name in NAMES}
    elif event in POINTS and isinstance(metrics := record.get("metrics"), dict):
        values = {f"{event}/{name}": value for name, value in metrics.items()}
    else:
        return {}
    return {name: x for name, value in values.items() if (x := _number(value)) is not None}


def _number(value: Any) -> float | None:
    """A number, which may be NaN or infinite; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
