"""A request to stop, as a flag: what a signal means to a worker.

Slurm signals every process of a step, two or three times and in the middle of anything. So a
handler sets the flag and returns; the trainer looks at the flag between two steps. Before the ranks
have met there is no such step, and a handler of Python's would not even run while a rank waits for
the others: the signal's own meaning, which ends the process, is what is needed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask for a stop: the usual ones, and the one that the job asked Slurm for."""
    own = os.environ.get("HPCDDP_SIGNAL", "")
    return (*STOP_SIGNALS, *([signal.Signals[f"SIG{own}"]] if own else []))


class Preemption:
    """The stop flag of one process, set by SIGUSR2 and SIGTERM while installed."""

    def __init__(self) -> None:
        self.requested = False
        self.signal = ""  # the first one that came
        self.when: float | None = None  # seconds since the epoch
        self._earlier: dict[int, list[object]] = {}  # the handlers replaced, oldest first

    @property
    def installed(self) -> bool:
        return bool(self._earlier)

    def install(self) -> None:
        """Take the stop signals over. A user's own handlers are kept and called. Main thread
        only."""
        if _is_submitit(signal.getsignal(signal.SIGCONT)):
            signal.signal(signal.SIGCONT, signal.SIG_DFL)
        for number in stop_signals():
            earlier = signal.getsignal(number)
            if earlier == self._handle:
                continue
            signal.signal(number, self._handle)
            kept = signal.SIG_DFL if _is_submitit(earlier) else earlier
            self._earlier.setdefault(number, []).append(kept)

    def renew(self) -> None:
        """If installed, take in the handlers that a user's code has set since."""
        if self.installed:
            self.install()

    def restore(self) -> None:
        """Put the earlier handlers back."""
        for number, (*_, earlier) in self._earlier.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        self._earlier.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.signal, self.when = True, signal.Signals(number).name, time.time()
        chain = self._earlier.get(number)
        if not chain:
            return
        *older, newest = chain
        self._earlier[number] = older  # one that calls the handler it replaced comes here again
        try:
            if callable(newest):
                newest(number, frame)
        finally:
            self._earlier[number] = chain


def end_on_stop_signals() -> None:
    """Let the stop signals end this process at once, whoever has handlers for them: submitit's
    ignore TERM, and at USR2 queue the job again. Main thread only."""
    for number in (*stop_signals(), signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)


def _is_submitit(handler: object) -> bool:
    """submitit's handlers log, pickle and requeue by themselves: they must not run."""
    return getattr(handler, "__module__", None) == "submitit.core.job_environment"


def ignore_stop_signals(worker_id: int = 0) -> None:
    """For DataLoader workers (``worker_init_fn``): the rank decides when they end.

    A worker that died of Slurm's SIGTERM would take its rank with it. One that was forked within
    ``held_back`` cannot, from its first instant on.
    """
    for number in _signals_of_ranks():
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals_of_ranks())


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Stop signals come after this. A process that is forked within holds them back until it
    ignores them: torch's own handler would end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _signals_of_ranks())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signals_of_ranks() -> tuple[signal.Signals, ...]:
    return (*stop_signals(), signal.SIGUSR1, signal.SIGINT)
