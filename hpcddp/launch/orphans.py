"""Orphans of the children of this process: they get its signals, and are ended.

A shell that a signal ends leaves its program running. Under srun that does not happen: Slurm
signals all processes of a step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from hpcddp.processes import children, ignores, start_of

LOOK = 0.5  # seconds between two looks
STUCK = 10.0  # seconds for a killed process to end


class Orphans:
    """Orphans of this process's children; none, unless it has called adopt_orphans."""

    def __init__(self) -> None:
        self._others = set(children(os.getpid()))  # were here before
        self._signals: list[int] = []  # sent so far
        self._got: dict[int, int] = {}  # process -> how many of them it was sent
        self._next_look = 0.0

    def tell(self, number: int) -> None:
        """Send a signal once to each orphan, also to later ones."""
        if number not in self._signals:
            self._signals.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        for pid, got in self._got.items():
            for number in self._signals[got:]:
                _send(pid, number)
        self._got = dict.fromkeys(self._got, len(self._signals))

    def look(self, mine: Collection[int], *, now: bool = False) -> bool:
        """Send the signals to new orphans; whether one still runs that does not ignore the last
        signal. A data worker does, which would stay for five seconds without its rank.

        Args:
            mine: processes that are no orphans.
            now: look even if no signal was sent, or the last look was just before.
        """
        clock = time.monotonic()
        if now or (self._signals and clock >= self._next_look):
            self._next_look = clock + LOOK
            left = [p for p in children(os.getpid()) if p not in self._others and p not in mine]
            left = [p for p in left if not is_sentry(p)]
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            self._got = {pid: self._got.get(pid, 0) for pid in left if start_of(pid)}
            self._pass_on()
        return any(not ignores(pid, self._signals[-1]) for pid in self._got if self._signals)

    def kill(self) -> None:
        """Kill all orphans."""
        for pid in self._got:
            _send(pid, signal.SIGKILL)


def is_sentry(pid: int) -> bool:
    """Whether a process is a sentry, which may outlive the job."""
    from hpcddp.attempt.sentry import NAME  # not needed at the start

    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == NAME
    return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Ending:
    """What ranks that have ended leave on this node: it is killed, also what comes up meanwhile.

    Args:
        code: the ranks' exit code.
    """

    def __init__(self, code: int) -> None:
        self.code, self._until = code, time.monotonic() + STUCK

    @property
    def late(self) -> bool:
        """Whether the time is over for what cannot be killed."""
        return time.monotonic() > self._until

    def left(self) -> list[int]:
        """The processes that are left."""
        left = [pid for pid in children(os.getpid()) if not is_sentry(pid)]
        for pid in left:
            _send(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return left
