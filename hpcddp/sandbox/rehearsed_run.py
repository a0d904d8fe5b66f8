"""Rehearsal: a run on a sandbox, as one looks at it and lays hands on it."""

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
from hpcddp.sandbox.own_processes import Process
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.submit.status import Status, status

T = TypeVar("T")

TICK = 0.1  # seconds
LOOK = 0.01  # seconds between two looks at a run's step
ASK = 2.0  # seconds between two questions to Slurm


class Over(Exception):
    """The run has ended while something else was waited for."""

    def __init__(self, found: Status) -> None:
        super().__init__(found.state)
        self.status = found


class RehearsedRun:
    """One run, on the sandbox of a rehearsal.

    Args:
        patience: seconds that a run may need for its next life.
        clock: its program tells no steps: each TICK of a life counts as one.
    """

    def __init__(
        self, sandbox: Sandbox, run: RunDir, patience: float, *, clock: bool = False
    ) -> None:
        self.sandbox, self.run, self.patience, self.clock = sandbox, run, patience, clock
        self.first_steps: dict[int, tuple[int, float]] = {}  # attempt -> step, seconds since epoch
        self._born: dict[int, float] = {}  # attempt -> when its ranks were seen first
        self._asked = 0.0

    @property
    def attempt(self) -> AttemptDir | None:
        """The newest attempt."""
        return next(reversed(self.run.all_attempts()), None)

    @property
    def number(self) -> int:
        """The newest attempt's number; 0 if there is none."""
        return self.attempt.number if self.attempt else 0

    def look(self) -> tuple[int, int]:
        """The newest attempt, and the step that it has come to in its life; zeros without."""
        newest = self.attempt
        if newest is None:
            return 0, 0
        step, when = self._ticks(newest.number) if self.clock else read_step(newest)
        if step:
            self.first_steps.setdefault(newest.number, (step, when))
        return newest.number, step

    def _ticks(self, number: int) -> tuple[int, float]:
        """How long the ranks of an attempt have lived, in ticks, and now."""
        if number not in self._born:
            if self.number != number or not self.tasks():
                return 0, 0.0
            self._born[number] = time.time()
        now = time.time()
        return int((now - self._born[number]) / TICK) + 1, now

    def facts(self) -> ledger.Attempt:
        """The newest attempt's facts."""
        found = ledger.last(self.run)
        if found is None:
            raise SandboxError("no attempt has begun", where=self.run.name)
        return found

    def until(
        self, good: Callable[[], T], what: str, seconds: float = 0.0, *, ends: bool = False
    ) -> T:
        """Wait until something is so, and look at the run's step meanwhile.

        Args:
            ends: the run is to end meanwhile.

        Raises:
            Over: the run ended for good before.
            SandboxError: it took too long.
        """
        deadline = time.monotonic() + (seconds or self.patience)
        while True:
            ended = None if ends else self._ended()
            self.look()
            with contextlib.suppress(SlurmUnreachable):  # a busy machine: it is asked again
                if found := good():
                    return found
            if ended:
                raise Over(ended)
            if time.monotonic() > deadline:
                raise SandboxError(f"waited in vain until {what}", where=self.run.name)
            time.sleep(LOOK)

    def until_after(self, number: int) -> None:
        """Wait until an attempt after this one has begun."""
        self.until(lambda: self.number > number, "the job runs again")

    def _ended(self) -> Status | None:
        """The run's status if it has ended for good; Slurm is asked now and then only."""
        last = ledger.last(self.run)
        told = last and last.cause is not None and last.action not in decision.RETURNS
        if not told and time.monotonic() < self._asked + ASK:
            return None
        self._asked = time.monotonic()
        found = status(self.run)
        return found if found.final and not found.stale else None

    def gone(self, number: int) -> bool:
        """Whether an attempt has ended, whoever says so."""
        last = self.facts()
        return last.number > number or last.cause is not None

    def ranks(self) -> list[Process]:
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

    def tasks(self) -> list[Process]:
        """What Slurm has started for the run, whether it tells of itself or not."""
        return own_processes.of_steps(str(self.run.path))

    def hosts(self) -> list[str]:
        """The nodes of the newest attempt."""
        return expand_hosts(self.facts().nodes)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let the run stand still, so that what takes Slurm a while comes at this very step."""
        ranks = self.ranks()
        own_processes.send(ranks, signal.SIGSTOP)
        try:
            yield
        finally:
            own_processes.send(ranks, signal.SIGCONT)
