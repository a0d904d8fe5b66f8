"""The end of a rank's process, whatever its threads and children do."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from hpcddp.attempt import exit_codes


def end(code: int) -> NoReturn:
    """End the process at once: tearing down a process group that lost a rank can hang."""
    end_children()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or exit_codes.FAILED
    os._exit(code)


def hung() -> NoReturn:
    """End the process from the watchdog's thread: the main one may hold any lock, print's too."""
    with contextlib.suppress(Exception):
        end_children()
    os._exit(exit_codes.HUNG)


def end_children() -> None:
    """Kill the DataLoader workers: they ignore the stop signals, and would live on for seconds."""
    if "multiprocessing" not in sys.modules:
        return
    import multiprocessing
    import signal
    import threading

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker dies
    for child in multiprocessing.active_children():
        child.kill()
