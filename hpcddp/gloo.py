"""gloo's threads, which must not outlive Python.

A thread of gloo releases a collective's tensors after the wait for it has returned. Where the last
hold on a tensor of Python's goes while Python ends, the thread cannot take Python's lock any more,
and the process dies of SIGABRT ("terminate called without an active exception", torch 2.13,
ProcessGroupGloo::runLoop): a script that has done all it had to do would count as a crash.
Ending the process group joins its threads, but few scripts end it, and one that made a
DistributedDataParallel joins them only if nothing holds the group any more.

torch calls ``watch_over`` when it is imported (entry point ``torch.backends``, which torch 2.5 and
later look for), so a job's scripts need no line for it where hpcddp is installed beside torch.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from pathlib import Path

NAME = "pt_gloo_runloop"
QUIET = 3  # looks, one after the other, that see all of them asleep
LIMIT = 1.0  # seconds


def watch_over() -> None:
    """In a process of a job: let gloo's threads come to rest before Python ends."""
    if "HPCDDP_RUN_DIR" in os.environ:
        atexit.register(rest)


def rest() -> None:
    """Wait, before Python ends, until gloo's threads have nothing in hand.

    They sleep for want of work or for Python's lock; while this sleeps, they get that.
    """
    end, quiet = time.monotonic() + LIMIT, 0
    while quiet < QUIET and time.monotonic() < end:
        states = list(_states())
        if not states:
            return
        quiet = quiet + 1 if set(states) == {"S"} else 0
        time.sleep(0.001)


def _states() -> Iterator[str]:
    """The state of each of them (proc(5), /proc/pid/stat)."""
    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            words, _, state = path.read_text().rpartition(") ")
        except OSError:  # it has ended
            continue
        if words.endswith(NAME):
            yield state[0]
