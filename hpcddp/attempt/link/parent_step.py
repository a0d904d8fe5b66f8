"""A step of Slurm that runs parents of ranks: one srun, and the lines that come from it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence


class ParentStep:
    """A running srun.

    Args:
        words: its command.
        quiet: leave out what srun itself says: it may find that a node has not come back.
    """

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], *, quiet: bool) -> None:
        self._process = subprocess.Popen(
            list(words), env=dict(environ), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._quiet, self._began, self._rest = quiet, time.monotonic(), b""

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    @property
    def age(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._began

    @property
    def closed(self) -> bool:
        """Whether no more lines come."""
        assert self._process.stdout
        return self._process.stdout.closed

    def fileno(self) -> int:
        """The descriptor of its lines, for selectors."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def lines(self) -> list[bytes]:
        """The lines that have come, without their ends; waits for the first one."""
        assert self._process.stdout
        data = os.read(self.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data:
            self._process.stdout.close()
            lines = [self._rest] if self._rest else []
        return [line for line in lines if not (self._quiet and line.startswith(b"srun: "))]

    def kill(self) -> None:
        """End it at once; on living nodes its tasks are gone within a second or two."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
