"""The log of an attempt, written beside the supervisor: its disk may not answer for minutes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from pathlib import Path

MOST = 10_000  # texts that wait for the disk; further ones are lost


class LogWriter:
    """Writes to the output of this process, in a thread."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[bytes | Path] = queue.Queue(MOST)
        threading.Thread(target=self._work, name="hpcddp log", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether all is written."""
        return not self._waiting.unfinished_tasks

    def open(self, log: Path) -> None:
        """Write to another file from now on; if it cannot be opened, still to the one before."""
        self._put(log)

    def write(self, text: bytes) -> None:
        """Append to the file; a full disk loses lines, not ranks."""
        self._put(text)

    def _put(self, what: bytes | Path) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(what)

    def _work(self) -> None:
        while True:
            what = self._waiting.get()
            with contextlib.suppress(OSError):
                if isinstance(what, bytes):
                    os.write(1, what)
                else:
                    _redirect(what)
            self._waiting.task_done()


def _redirect(log: Path) -> None:
    new = os.open(log, os.O_WRONLY | os.O_APPEND)
    for old in (1, 2):
        os.dup2(new, old)
    os.close(new)
