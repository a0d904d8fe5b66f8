"""Stop requests: the flag that a signal sets in a worker.

Slurm signals each process of a step two or three times, at any moment. So the handler only sets a
flag, and the trainer reads the flag between two steps. Before the process group has started, no
handler is installed, since Python would not run it while a rank waits for the others: then the
signal ends the process.
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
    """The signals that request a stop: the usual ones, and the signal that the job requested."""
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
        """Install the handler. It also calls the handlers that it replaces. Main thread only."""
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
        """If installed, also replace handlers that the user's code has installed since."""
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
        self._earlier[number] = older  # a handler that calls its predecessor calls this one again
        try:
            if callable(newest):
                newest(number, frame)
        finally:
            self._earlier[number] = chain


def end_on_stop_signals() -> None:
    """Let the stop signals end this process at once. Handlers of submitit, which ignore TERM and
    requeue at USR2, are removed. Main thread only."""
    for number in (*stop_signals(), signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)


def _is_submitit(handler: object) -> bool:
    """Whether a handler is of submitit. Those log, pickle and requeue, and must not run."""
    return getattr(handler, "__module__", None) == "submitit.core.job_environment"


def ignore_stop_signals(worker_id: int = 0) -> None:
    """For DataLoader workers (``worker_init_fn``), which their rank ends.

    Slurm's SIGTERM must not end a worker: its rank would fail. Fork it within ``held_back``, so
    that the signal cannot end it before this call either.
    """
    for number in _signals_of_ranks():
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals_of_ranks())


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delay stop signals until the end of this context. A process forked within it delays them
    until it ignores them, since torch's handler would end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _signals_of_ranks())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signals_of_ranks() -> tuple[signal.Signals, ...]:
    return (*stop_signals(), signal.SIGUSR1, signal.SIGINT)
