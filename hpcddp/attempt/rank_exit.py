"""Records a rank's failure, and ends its process with all threads and children."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from hpcddp.attempt import exit_codes

if TYPE_CHECKING:
    from hpcddp.rundir import AttemptDir

LINGER = 5.0  # seconds that a rank with a possible user error waits for the others


def end(code: int) -> NoReturn:
    """End the process at once: destroying a process group that lost a rank can hang."""
    end_children()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or exit_codes.FAILED
    os._exit(code)


def hung() -> NoReturn:
    """End the process from the watchdog's thread: the main one may hold any lock, even print's."""
    with contextlib.suppress(Exception):
        end_children()
    os._exit(exit_codes.HUNG)


def end_children() -> None:
    """Kill the DataLoader workers: they ignore stop signals, and would run on for seconds."""
    if "multiprocessing" not in sys.modules:
        return
    import multiprocessing
    import signal
    import threading

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker dies
    for child in multiprocessing.active_children():
        child.kill()


def share_failure(
    error: BaseException, attempt: AttemptDir, rank: int, size: int, linger: float = LINGER
) -> None:
    """Record a failure that may be a user error, and wait until the others have done so: when the
    first rank leaves, its launcher ends them. A failure that all ranks share is a user error; any
    other is a crash of a node.

    Args:
        linger: seconds to wait at most.
    """
    from hpcddp.errors import HpcddpError

    # `where` may name the rank.
    what = error.what if isinstance(error, HpcddpError) else str(error)
    what = f"{type(error).__name__}: {what}".replace("\n", " ")
    deadline = time.monotonic() + linger
    with contextlib.suppress(OSError):
        with attempt.failures.open("a", encoding="utf-8", errors="backslashreplace") as f:
            f.write(f"{rank} {size} {what}\n")
        while _recorded(attempt) < size and time.monotonic() < deadline:
            time.sleep(0.05)


def _recorded(attempt: AttemptDir) -> int:
    """The number of ranks that have recorded a failure: a rank may run several processes."""
    return len({line.split(b" ")[0] for line in attempt.failures.read_bytes().splitlines()})
