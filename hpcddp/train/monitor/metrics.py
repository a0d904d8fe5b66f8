"""attempts/N/metrics.jsonl: one record a line, written by rank 0 (standard library only).

Every record has event, attempt, time and, where it has one, step; joblog.py says the same to a
person.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hpcddp.attempt.joblog import line
from hpcddp.rundir import STEP, AttemptDir, RunDir, last_lines

if TYPE_CHECKING:
    from hpcddp.train.checkpoint.lease import Lease

QUICK = 5.0  # seconds: the time of a save that failed sooner does not count
TAIL = 1 << 16  # bytes of an earlier attempt's metrics that are read
OnRecord = Callable[[dict[str, Any]], None]


class Recorder:
    """Rank 0's pen. On other ranks it does nothing."""

    def __init__(
        self,
        attempt: AttemptDir,
        *,
        active: bool,
        on_record: OnRecord | None = None,
        lease: Lease | None = None,
    ) -> None:
        self._attempt = attempt.number
        self._on_record = on_record
        self._lease = lease
        self._file: IO[bytes] | None = None
        self._step: IO[bytes] | None = None
        self._ranks: IO[bytes] | None = None
        self._torn: set[str] = set()  # files whose last line stands there in part
        if active:
            attempt.path.mkdir(parents=True, exist_ok=True)
            self._file = attempt.metrics.open("ab", buffering=0)
            self._ranks = attempt.ranks.open("ab", buffering=0)
            self._step = _opened(attempt.step)

    def __call__(self, event: str, **values: Any) -> None:
        """Write one record: who follows the run sees it at once. Print its line.

        A record that a full disk does not take is lost, and the training goes on. Nothing is
        written once the lease is lost.
        """
        if self._file is None or (self._lease and self._lease.lost):
            return
        record = {"event": event, "attempt": self._attempt, "time": time.time(), **values}
        self._write("metrics", self._file, record)
        if text := line(record):
            with contextlib.suppress(OSError):
                print(text, flush=True)
        if self._on_record is not None:
            self._on_record(record)

    def ranks(self, **values: Any) -> None:
        """One line of each rank's own figures, lists by rank."""
        if self._ranks is not None and not (self._lease and self._lease.lost):
            self._write("ranks", self._ranks, {**values, "time": time.time()})

    def took(self, step: int) -> None:
        """Note a step that was taken, in 1 to 2 microseconds; it outlives a killed process.

        A map of the file would be quicker, and end the rank by SIGBUS where the disk is full.
        """
        if self._step is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._step.fileno(), STEP.pack(step, time.time()), 0)

    def _write(self, name: str, file: IO[bytes], values: dict[str, Any]) -> None:
        """One line in one piece, below a part of an earlier one that a full disk left."""
        data = json.dumps(values).encode() + b"\n"
        torn = name in self._torn
        if torn:
            data = b"\n" + data
        with contextlib.suppress(OSError):
            written = file.write(data)
            self._torn.discard(name)
            if written < len(data) and (torn or written > 0):
                self._torn.add(name)

    def close(self) -> None:
        for file in (self._file, self._ranks, self._step):
            if file is not None:
                with contextlib.suppress(OSError):  # a network's disk tells here that it was full
                    file.close()
        self._file = self._ranks = self._step = None


def _opened(path: Path) -> IO[bytes] | None:
    """The file for the last step; none where it cannot be made."""
    with contextlib.suppress(OSError):
        return path.open("wb", buffering=0)
    return None


def earlier_saves(run: RunDir, attempt: int) -> list[float]:
    """Seconds of the last saves of the newest attempt before this one that tells of any; of failed
    ones those that took longer. One that the time limit cut tells nothing."""
    with contextlib.suppress(OSError):
        for folder in reversed(run.all_attempts()):
            tail = last_lines(folder.metrics, TAIL) if folder.number < attempt else []
            took = {
                event: [
                    float(r["seconds"])
                    for r in tail
                    if r.get("event") == event and isinstance(r.get("seconds"), int | float)
                ]
                for event in ("checkpoint", "checkpoint_failed")
            }
            good = took["checkpoint"]
            least = max(good, default=QUICK)
            if seconds := [*good, *(s for s in took["checkpoint_failed"] if s > least)]:
                return seconds
    return []
