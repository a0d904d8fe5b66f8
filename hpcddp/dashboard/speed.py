"""The speed of a run, and its slow ranks, from its newest attempt's records."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from hpcddp.attempt.joblog import SLOWNESS
from hpcddp.observe.curves import whole_lines
from hpcddp.rundir import RunDir, parse_lines

TAIL = 1 << 15  # bytes for the rate
POINTS = 200


class Newest:
    """The figures in the list beside a run's status; each byte is read once."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.samples_per_s: float | None = None
        self._slow: set[tuple[str, str]] = set()  # part of a step (compute or data), rank
        self._points: deque[tuple[float, float]] = deque(maxlen=POINTS)  # step, time of its record
        self._attempt, self._read = 0, 0

    @property
    def slow(self) -> int:
        """The number of ranks that are slow in computing or in reading data."""
        return len({rank for _, rank in self._slow})

    @property
    def step_s(self) -> float | None:
        """Recent seconds per step, with everything between steps."""
        if len(self._points) < 2 or self._points[-1][0] <= self._points[0][0]:
            return None
        (first, began), (last, now) = self._points[0], self._points[-1]
        return (now - began) / (last - first)

    def update(self, *, whole: bool) -> None:
        """Read new lines.

        Args:
            whole: from the attempt's start, for the slow ranks; else only the end.
        """
        folders = self.run.all_attempts()
        if not folders:
            return
        metrics = folders[-1].metrics
        if folders[-1].number != self._attempt:
            self._attempt, self._read = folders[-1].number, 0
            self._slow.clear()
            self._points.clear()
        if not whole:
            self._read = max(self._read, _start(metrics))
        for data in whole_lines(metrics, self._read):
            self._read += len(data)
            self._marks(data)
            self._rate(data[data.find(b"\n", -TAIL) + 1 :] if len(data) > TAIL else data)

    def _marks(self, data: bytes) -> None:
        for record in parse_lines(SLOWNESS.findall(data)):
            part = str(record.get("what")), str(record.get("rank"))
            if record.get("event") == "slow":
                self._slow.add(part)
            elif record.get("event") == "recovered":
                self._slow.discard(part)

    def _rate(self, data: bytes) -> None:
        for record in parse_lines(data.splitlines()):
            if record.get("event") == "rollback":
                self._points.clear()
            if record.get("event") == "train":
                self._points.append((record["step"], record["time"]))
                self.samples_per_s = record.get("samples_per_s")


def _start(path: Path) -> int:
    """The byte at which the end of a file begins, somewhere within a line."""
    try:
        return max(0, path.stat().st_size - TAIL)
    except OSError:
        return 0
