"""The states of runs, polled: the run folders are read each time, Slurm is asked less often."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from hpcddp import record
from hpcddp.errors import RunError
from hpcddp.rundir import RunDir
from hpcddp.slurm import commands as slurm
from hpcddp.submit import status
from hpcddp.submit.status import Status

LONGEST = 300.0  # seconds at most between two questions while Slurm does not answer
USUAL = 30.0  # seconds, where no run's profile gives them
FIELDS = ("state", "reason", "hosts", "since", "job_id", "stale")  # taken from Slurm's answer


class SlurmState(NamedTuple):
    """The status of a run by Slurm, and the facts in its run folder at that moment."""

    folder: tuple[object, ...]
    status: Status


class SlurmStates:
    """The last answers of Slurm about some runs. Each holds until its run folder changes.

    The cluster profiles set the seconds between two questions. They double while Slurm does not
    answer.

    Args:
        aside: ask in a thread, for a caller that must not wait.
    """

    def __init__(self, *, aside: bool) -> None:
        self.away = ""  # why Slurm did not answer
        self._aside = aside
        self._states: dict[str, SlurmState] = {}
        self._due, self._pause = -math.inf, 0.0
        self._asks: threading.Thread | None = None

    def of(self, run: RunDir, known: Status) -> Status:
        """The status of a run: by its folder, with Slurm's answer where that still holds.

        Args:
            known: its status by its folder; this changes it.
        """
        if known.final and known.state not in status.UNTOLD:
            return known
        if known.backend != "slurm":  # a look at this machine's processes
            return status.asked(run, known)
        answer = self._states.get(run.name)
        if answer and answer.folder == _facts(known):
            for name in ("stale",) if answer.status.stale else FIELDS:
                setattr(known, name, getattr(answer.status, name))
        return known

    def ask(self, runs: Sequence[RunDir]) -> None:
        """Ask Slurm about these runs when it is time: one question for all."""
        if time.monotonic() < self._due or (self._asks and self._asks.is_alive()):
            return
        if not self._aside:
            self._ask(runs)
            return
        self._asks = threading.Thread(target=self._ask, args=(runs,), daemon=True)
        self._asks.start()

    def _ask(self, runs: Sequence[RunDir]) -> None:
        queue = status.once(slurm.queue) if len(runs) > 1 else None
        states: dict[str, SlurmState] = {}
        pauses: list[float] = []
        for run in runs:
            # The caller that reads a damaged folder gets the error.
            with contextlib.suppress(Exception if self._aside else RunError):
                known = status.known(run)
                if known.backend == "slurm":
                    folder = _facts(known)  # before the answer changes it
                    states[run.name] = SlurmState(folder, status.asked(run, known, queue))
                    pauses.append(record.read(run).poll_seconds)
        stale = [answer.status for answer in states.values() if answer.status.stale]
        self.away = stale[0].reason if stale else ""
        usual = max(pauses, default=USUAL)
        self._pause = min(max(2 * self._pause, usual), LONGEST) if stale else usual
        self._states, self._due = states, time.monotonic() + self._pause


class StatusPoll:
    """One run, polled.

    Args:
        aside: ask Slurm in a thread.
    """

    def __init__(self, run: RunDir, *, aside: bool = False) -> None:
        self.run, self._slurm = run, SlurmStates(aside=aside)

    def look(self) -> Status:
        """The run now.

        Raises:
            RunError: its folder is damaged or missing.
        """
        self._slurm.ask([self.run])
        state = self._slurm.of(self.run, status.known(self.run))
        if state.stale:
            state.reason = self._slurm.away or state.reason
        return state


def _facts(known: Status) -> tuple[object, ...]:
    """The facts in a run folder that change with the run. Slurm's answer holds as long as they."""
    return known.state, known.attempt, known.job_id, known.since
