"""Sending metrics to a run's trackers during an attempt: a process beside the ranks, on one node.

    python -P -m hpcddp.trackers RUN ATTEMPT PID TRACKER...

The batch script starts it on the first node, beside the process PID that starts the ranks. When
that process has left, this one sends the rest and leaves, within GRACE seconds whatever a tracker
does. Until then nothing waits for it. A failure here is a line in the log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from hpcddp import processes
from hpcddp.attempt import ledger
from hpcddp.errors import HpcddpError
from hpcddp.preempt import ignore_stop_signals
from hpcddp.rundir import RunDir
from hpcddp.trackers import module, plain

PAUSE = 2.0  # seconds between two looks at the run dir
TICK = 0.1  # between two looks whether the ranks are still there
GRACE = 10.0  # seconds for the rest, from the ranks' end on


def main(args: list[str]) -> None:
    """Send the new metrics until the ranks have ended."""
    folder, number, pid, *names = args
    ignore_stop_signals()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    run, gone = RunDir(folder), threading.Event()
    threading.Thread(target=_watch, args=(run, int(pid), gone), daemon=True).start()
    _load(names)
    sender = None
    over = final = False
    while not over:
        over = gone.wait(PAUSE)
        if over:
            final = _ended(run, int(number))
        if run.outlived(int(number)):  # by an attempt with a process of its own
            return
        if sender is None and (over or run.attempt(int(number)).metrics.exists()):
            from hpcddp.trackers.send import Sender

            sender = Sender(
                run, names, lambda name, error: print(in_words(run, name, error)), int(number)
            )
        if sender:
            sender.send(over=final)
    if sender:
        sender.close()


def in_words(run: RunDir, name: str, error: Exception) -> str:
    """The failure of a tracker, as a line."""
    known = isinstance(error, HpcddpError)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    line = " ".join(plain(message).split())[:300]
    return f"hpcddp: {name} is not told any more ({line}); hpcddp track {run.name} --to {name} does"


def _load(names: Sequence[str]) -> None:
    """Import the trackers while the ranks start: the end of a short training leaves no time for it.
    An import that fails here fails again where it is reported."""
    for name in names:
        with contextlib.suppress(Exception):
            module(name)


def _watch(run: RunDir, pid: int, gone: threading.Event) -> None:
    """Wait for a process to leave. From then on this process has some seconds, wherever a tracker
    delays it."""
    began = processes.start_of(pid)
    while began and processes.start_of(pid) == began:
        time.sleep(TICK)
    _give_up_in(GRACE, run)
    gone.set()


def _ended(run: RunDir, number: int) -> bool:
    """Wait until the script has recorded why the attempt ended: that is sent too.

    Returns: whether the run ends with it. Else its newest step may get more values.
    """
    until = time.monotonic() + GRACE / 2
    while time.monotonic() < until:
        facts = ledger.read(run.attempt(number))
        if facts is None or not facts.live:
            break
        time.sleep(TICK)
    from hpcddp.submit import status

    return status.known(run).final


def _give_up_in(seconds: float, run: RunDir) -> None:
    """End this process after some time, whatever delays it; a second later without Python."""

    def give_up() -> NoReturn:
        text = (
            f"hpcddp: the trackers took too long; hpcddp track {run.name} --to NAME tells the rest"
        )
        print(text, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads of the trackers' libraries may hold it up
