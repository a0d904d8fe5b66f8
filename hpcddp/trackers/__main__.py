"""Send metrics to trackers during an attempt: a process beside the ranks, on the first node.

    python -P -m hpcddp.trackers RUN ATTEMPT PID TRACKER...

The batch script starts it on the first node, beside the process PID that starts the ranks. When
that process has ended, this one sends the rest and ends, after at most GRACE seconds even if a
tracker hangs. Nothing else waits for it. A failure is a line in the log.
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

PAUSE = 2.0  # seconds between two checks of the run folder
TICK = 0.1  # seconds between two checks of the ranks
GRACE = 10.0  # seconds for the rest after the ranks' end


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
        if run.outlived(int(number)):  # the next attempt has its own process
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
    """A log line about the failure of a tracker."""
    known = isinstance(error, HpcddpError)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    line = " ".join(plain(message).split())[:300]
    return f"hpcddp: cannot send to {name} ({line}); `{_rest(run, name)}` sends the rest"


def _rest(run: RunDir, name: str) -> str:
    return f"hpcddp track {run.name} --to {name}"


def _load(names: Sequence[str]) -> None:
    """Import the trackers while the ranks start: after a short training there is no time for it.

    A failing import is reported later, when the tracker is used.
    """
    for name in names:
        with contextlib.suppress(Exception):
            module(name)


def _watch(run: RunDir, pid: int, gone: threading.Event) -> None:
    """Wait for the end of a process, and limit this process's time from then on."""
    began = processes.start_of(pid)
    while began and processes.start_of(pid) == began:
        time.sleep(TICK)
    _give_up_in(GRACE, run)
    gone.set()


def _ended(run: RunDir, number: int) -> bool:
    """Wait until the batch script has recorded the cause of the attempt's end, to send it too.

    Returns:
        Whether the run has ended. Otherwise its newest step may get more values.
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
    """End this process after some seconds. If Python hangs, a signal ends it a second later."""

    def give_up() -> NoReturn:
        what = f"hpcddp: the trackers did not finish within {seconds:g} s"
        print(f"{what}; `{_rest(run, 'NAME')}` sends the rest", flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads of the trackers' libraries could delay a normal exit
