"""What is known of runs, asked over and over: their folders each time, Slurm now and then."""

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

LONGEST = 300.0  # seconds between two questions while Slurm does not answer
USUAL = 30.0  # where no run says otherwise
FIELDS = ("state", "reason", "hosts", "since", "job_id", "stale")  # that Slurm may know better


class Word(NamedTuple):
    """What Slurm said of a run, and what the run dir said at that moment."""

    then: tuple[object, ...]
    found: Status


class Told:
    """What Slurm said last of some runs; it holds until a run dir tells something new.

    Slurm is asked at the pace of the clusters' profiles, which doubles while it does not answer.

    Args:
        aside: ask in a thread, for who must not wait for it.
    """

    def __init__(self, *, aside: bool) -> None:
        self.away = ""  # why Slurm did not answer
        self._aside = aside
        self._words: dict[str, Word] = {}
        self._due, self._pause = -math.inf, 0.0
        self._asks: threading.Thread | None = None

    def better(self, run: RunDir, found: Status) -> Status:
        """A run's state, from what its folder says: what Slurm said of just that, if it did."""
        if found.final and found.state not in status.UNTOLD:
            return found
        if found.backend != "slurm":  # a look at this machine's processes
            return status.asked(run, found)
        word = self._words.get(run.name)
        if word and word.then == _life(found):
            for name in ("stale",) if word.found.stale else FIELDS:
                setattr(found, name, getattr(word.found, name))
        return found

    def ask(self, runs: Sequence[RunDir]) -> None:
        """Ask Slurm of these runs when it is time: one question for all."""
        if time.monotonic() < self._due or (self._asks and self._asks.is_alive()):
            return
        if not self._aside:
            self._ask(runs)
            return
        self._asks = threading.Thread(target=self._ask, args=(runs,), daemon=True)
        self._asks.start()

    def _ask(self, runs: Sequence[RunDir]) -> None:
        queue = status.once(slurm.queue) if len(runs) > 1 else None
        words: dict[str, Word] = {}
        pauses: list[float] = []
        for run in runs:
            # What is wrong with a folder is told to who looks at it.
            with contextlib.suppress(Exception if self._aside else RunError):
                known = status.known(run)
                if known.backend == "slurm":
                    words[run.name] = Word(_life(known), status.asked(run, known, queue))
                    pauses.append(record.read(run).poll_seconds)
        stale = [word.found for word in words.values() if word.found.stale]
        self.away = stale[0].reason if stale else ""
        usual = max(pauses, default=USUAL)
        self._pause = min(max(2 * self._pause, usual), LONGEST) if stale else usual
        self._words, self._due = words, time.monotonic() + self._pause


class StatusPoll:
    """One run, asked over and over.

    Args:
        aside: ask Slurm in a thread.
    """

    def __init__(self, run: RunDir, *, aside: bool = False) -> None:
        self.run, self._told = run, Told(aside=aside)

    def look(self) -> Status:
        """The run now.

        Raises:
            RunError: its folder is damaged, or gone.
        """
        self._told.ask([self.run])
        found = self._told.better(self.run, status.known(self.run))
        if found.stale:
            found.reason = self._told.away or found.reason
        return found


def _life(found: Status) -> tuple[object, ...]:
    """What the run dir says of a run; while that stays, so does what Slurm said."""
    return found.state, found.attempt, found.job_id, found.since
