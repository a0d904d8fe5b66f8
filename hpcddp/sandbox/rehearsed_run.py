"""Rehearsal: a run on a sandbox; it can be read, waited for and paused."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from hpcddp.attempt import decision, ledger
from hpcddp.errors import SandboxError, SlurmUnreachable
from hpcddp.rundir import AttemptDir, RunDir, read_lines, read_step
from hpcddp.sandbox import own_processes
from hpcddp.sandbox.cluster import Sandbox
from hpcddp.sandbox.own_processes import OwnProcess
from hpcddp.sandbox.rehearsal_sandbox import Say
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.submit.status import Status, status

T = TypeVar("T")

TICK = 0.1  # seconds
LOOK = 0.01  # seconds between two readings of a run's step
ASK = 2.0  # seconds between two questions to Slurm
TRIES, MINUTE = 3, 60.0  # starts of a daemon that ends by itself, at most, in so many seconds


class Over(Exception):
    """The run has ended before the expected event."""

    def __init__(self, end: Status) -> None:
        super().__init__(end.state)
        self.status = end


class RehearsedRun:
    """One run, on the sandbox of a rehearsal.

    Args:
        patience: seconds that a run may need for its next attempt.
        say: called with a line for each event.
        clock: its program reports no steps: each TICK of an attempt counts as one.
    """

    def __init__(
        self, sandbox: Sandbox, folder: RunDir, patience: float, say: Say, *, clock: bool = False
    ) -> None:
        self.sandbox, self.folder, self.patience, self.clock = sandbox, folder, patience, clock
        self.first_steps: dict[int, tuple[int, float]] = {}  # attempt -> step, seconds since epoch
        self._began: dict[int, float] = {}  # attempt -> the time at which its ranks were first seen
        self.say = say
        self.stopped = ""  # the daemon that a fault has ended, and will start again
        self._asked = self._checked = 0.0
        self._revived: list[tuple[str, float]] = []  # daemon, and time.monotonic() of its start

    @property
    def attempt(self) -> AttemptDir | None:
        """The newest attempt."""
        return next(reversed(self.folder.all_attempts()), None)

    @property
    def number(self) -> int:
        """The newest attempt's number; 0 if there is none."""
        return self.attempt.number if self.attempt else 0

    def look(self) -> tuple[int, int]:
        """The newest attempt and its step; zeros before the first one."""
        newest = self.attempt
        if newest is None:
            return 0, 0
        step, when = self._ticks(newest.number) if self.clock else read_step(newest)
        if step:
            self.first_steps.setdefault(newest.number, (step, when))
        return newest.number, step

    def _ticks(self, number: int) -> tuple[int, float]:
        """The age of an attempt's ranks in ticks, and the time now."""
        if number not in self._began:
            if self.number != number or not self.tasks():
                return 0, 0.0
            self._began[number] = time.time()
        now = time.time()
        return int((now - self._began[number]) / TICK) + 1, now

    def facts(self) -> ledger.Attempt:
        """The newest attempt's facts."""
        newest = ledger.last(self.folder)
        if newest is None:
            raise SandboxError("no attempt has started", where=str(self.folder.path))
        return ledger.refreshed(self.folder, newest)

    def until(
        self, ask: Callable[[], T], event: str, seconds: float = 0.0, *, ends: bool = False
    ) -> T:
        """Wait until ``ask`` returns a true result, and read the run's step meanwhile.

        Args:
            event: what is expected, for the error.
            ends: the run is expected to end.

        Raises:
            Over: the run ended for good before.
            SandboxError: it took too long.
        """
        seconds = seconds or self.patience
        deadline = time.monotonic() + seconds
        while True:
            ended = None if ends else self._ended()
            self.look()
            self.revive()
            with contextlib.suppress(SlurmUnreachable):  # a busy machine: ask again
                if result := ask():
                    return result
            if ended:
                raise Over(ended)
            if time.monotonic() > deadline:
                message = f"gave up waiting for {event}, after {seconds:.0f} s"
                raise SandboxError(message, where=str(self.folder.path))
            time.sleep(LOOK)

    def revive(self) -> None:
        """Start the daemons again that have ended by themselves.

        A slurmd of 22.05.8 can crash while it starts a step: the run would wait for its node.

        Raises:
            SandboxError: one ends again and again.
        """
        if (now := time.monotonic()) < self._checked + ASK:
            return
        self._checked = now
        for name in self.sandbox.ended():
            if name == self.stopped:
                continue
            self._revived = [(one, when) for one, when in self._revived if when > now - MINUTE]
            if sum(one == name for one, _ in self._revived) >= TRIES:
                message = f"{name} ended again, after {TRIES} starts; its last lines follow"
                where, hint = str(self.sandbox.logs), self.sandbox.last_lines(name)
                raise SandboxError(message, where=where, hint=hint)
            self.say(f"{name} ended, and not by a fault of this rehearsal: it is started again")
            self.sandbox.start_daemon(name)
            self._revived.append((name, now))

    def until_after(self, number: int, *, without: str = "") -> None:
        """Wait until an attempt after this one has begun, or this one goes on without a node that
        was lost before its ranks were started."""

        def continues() -> bool:
            at, step = self.look()
            return at > number or bool(without and step > 0 and without not in self.hosts())

        self.until(continues, "the next attempt")

    def _ended(self) -> Status | None:
        """The run's status if it has ended for good; Slurm is asked only from time to time."""
        last = ledger.last(self.folder)
        closed = last and last.cause is not None and last.action not in decision.RETURNS
        if not closed and time.monotonic() < self._asked + ASK:
            return None
        self._asked = time.monotonic()
        state = status(self.folder)
        return state if state.final and not state.stale else None

    def gone(self, number: int) -> bool:
        """Whether an attempt has ended: it has a cause, or there is a newer one."""
        last = self.facts()
        return last.number > number or last.cause is not None

    def ranks(self) -> list[OwnProcess]:
        """The processes of the newest attempt's ranks, by rank; none while it starts."""
        if self.attempt is None:
            return []
        if self.clock:
            return self.tasks()
        lines = read_lines(self.attempt.metrics)
        for line in lines:
            if line["event"] == "ranks":
                return own_processes.of_pids(rank["pid"] for rank in line["ranks"])
        return []

    def tasks(self) -> list[OwnProcess]:
        """The processes that Slurm has started for the run, with or without steps."""
        return own_processes.of_steps(str(self.folder.path))

    def hosts(self) -> list[str]:
        """The nodes of the newest attempt."""
        return expand_hosts(self.facts().nodes)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Pause the run, so that a slow action of Slurm comes at the right step."""
        ranks = self.ranks()
        own_processes.send(ranks, signal.SIGSTOP)
        try:
            yield
        finally:
            own_processes.send(ranks, signal.SIGCONT)
