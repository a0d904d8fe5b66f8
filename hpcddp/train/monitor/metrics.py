"""attempts/N/metrics.jsonl: one record per line, written by rank 0 (standard library only).

Every record has event, attempt and time, and step if it belongs to one; joblog.py makes its line
for people.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hpcddp.attempt import ledger
from hpcddp.attempt.joblog import NEW_STEP, line
from hpcddp.errors import UserError
from hpcddp.rundir import STEP, AttemptDir, RunDir, last_lines

if TYPE_CHECKING:
    from hpcddp.train.checkpoint.lease import Lease

QUICK = 5.0  # seconds; a save that failed sooner is ignored
TAIL = 1 << 16  # bytes of an earlier attempt's metrics that are read
OnRecord = Callable[[dict[str, Any]], None]


class Recorder:
    """Writes the records of rank 0; does nothing on other ranks."""

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
        self._torn: set[str] = set()  # files whose last line is incomplete
        self._known: float = math.inf  # the last step that was taken before; then infinite
        if active:
            known = ledger.taken_before(attempt)
            self._known = math.inf if known is None else known
            attempt.path.mkdir(parents=True, exist_ok=True)
            self._file = attempt.metrics.open("ab", buffering=0)
            self._ranks = attempt.ranks.open("ab", buffering=0)
            self._step = _opened(attempt.step)

    def __call__(self, event: str, **values: Any) -> None:
        """Write one record, unbuffered, and print its line.

        On a full disk the record is lost and the training continues. A superseded attempt writes
        nothing.
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
        """Write a line with each rank's own figures, as lists by rank."""
        if self._ranks is not None and not (self._lease and self._lease.lost):
            self._write("ranks", self._ranks, {**values, "time": time.time()})

    def took(self, step: int) -> None:
        """Store the number of a completed step, in 1 to 2 microseconds; a killed process keeps it.

        A memory map would be faster, but SIGBUS would end the rank on a full disk.
        """
        if self._step is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._step.fileno(), STEP.pack(step, time.time()), 0)
        if step > self._known:
            self._known = math.inf
            self(NEW_STEP, step=step)

    def _write(self, name: str, file: IO[bytes], values: dict[str, Any]) -> None:
        """Write one line at once, on a new line if a full disk left an incomplete one."""
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
                with contextlib.suppress(OSError):  # a network disk reports here that it is full
                    file.close()
        self._file = self._ranks = self._step = None


def _opened(path: Path) -> IO[bytes] | None:
    """The file for the last step; None if it cannot be made."""
    with contextlib.suppress(OSError):
        return path.open("wb", buffering=0)
    return None


def one_number(name: str, value: Any) -> float:
    """A value of ``Run.log`` as a number.

    Raises:
        UserError: it is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{name} is a {type(value).__name__}, expected one number", where="Run.log"
        ) from None


def earlier_saves(run: RunDir, attempt: int) -> list[float]:
    """Seconds of the last saves, from the newest earlier attempt that has any. A failed save counts
    if it took longer than the others; one that the time limit ended left no record."""
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
