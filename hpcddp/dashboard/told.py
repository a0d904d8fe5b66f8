"""What Slurm says of the runs that live: one question for all, rarely, and never in the way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcddp import record, slurm, status
from hpcddp.errors import SlurmUnreachable
from hpcddp.rundir import RunDir
from hpcddp.slurm import JobRow
from hpcddp.status import Status

LONGEST = 300.0  # seconds between two questions while Slurm does not answer
USUAL = 30.0  # and while it does, where no run says otherwise
FIELDS = ("state", "reason", "hosts", "since", "job_id", "stale")  # that Slurm may know better


class Word(NamedTuple):
    """What Slurm said of a run, and what the run dir said at that moment."""

    then: tuple[object, ...]
    found: Status


class Told:
    """What Slurm said last."""

    def __init__(self) -> None:
        self.away = ""  # why it did not answer
        self._words: dict[str, Word] = {}
        self._due = 0.0
        self._pause = USUAL
        self._asks: threading.Thread | None = None

    def better(self, run: RunDir, found: Status) -> Status:
        """A run's state, from what its folder says: what Slurm said of just that, if it did."""
        if found.final and found.state not in status.UNTOLD:
            return found
        if found.backend != "slurm":  # a look at this machine's processes
            return status.status(run)
        word = self._words.get(run.name)
        if word and word.then == _facts(found):
            for name in ("stale",) if word.found.stale else FIELDS:
                setattr(found, name, getattr(word.found, name))
        return found

    def ask(self, runs: Sequence[RunDir]) -> None:
        """Ask Slurm of these runs when it is time, in a thread: it may take long to answer."""
        if time.monotonic() < self._due or (self._asks and self._asks.is_alive()):
            return
        self._asks = threading.Thread(target=self._ask, args=(runs,), daemon=True)
        self._asks.start()

    def _ask(self, runs: Sequence[RunDir]) -> None:
        queue = once(slurm.queue)
        words, pauses = {}, [USUAL]
        for run in runs:
            with contextlib.suppress(Exception):  # the list tells what is wrong with a folder
                before = status.known(run)
                if before.backend == "slurm":
                    words[run.name] = Word(_facts(before), status.status(run, queue))
                    pauses.append(float(record.read(run).poll_seconds))
        stale = [word.found for word in words.values() if word.found.stale]
        self.away = stale[0].reason if stale else ""
        self._pause = min(2 * self._pause, LONGEST) if stale else max(pauses)
        self._words, self._due = words, time.monotonic() + self._pause


def _facts(found: Status) -> tuple[object, ...]:
    return found.state, found.attempt, found.job_id, found.since


def once(ask: Callable[[], list[JobRow]]) -> Callable[[], list[JobRow]]:
    """A question that is asked when its answer is first wanted, and not again."""
    said: list[list[JobRow] | SlurmUnreachable] = []

    def answer() -> list[JobRow]:
        if not said:
            try:
                said.append(ask())
            except SlurmUnreachable as error:
                said.append(error)
        if isinstance(said[0], SlurmUnreachable):
            raise said[0]
        return said[0]

    return answer
