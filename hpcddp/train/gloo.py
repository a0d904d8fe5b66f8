"""gloo's threads, which must not outlive Python.

A thread of gloo lets go of a collective's tensors after whoever waited was told. Where the last
hold on a tensor of Python's goes while Python ends, the thread cannot take Python's lock any more,
and the process dies of SIGABRT ("terminate called without an active exception", torch 2.13,
ProcessGroupGloo::runLoop). Ending the process group joins its threads, but not while something
holds it: the functions of this import do, as defaults, when they are made after the group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed.nn.functional  # noqa: F401

NAME = "pt_gloo_runloop"
QUIET = 3  # looks, one after the other, that see all of them asleep
LIMIT = 1.0  # seconds


def rest() -> None:
    """Wait, before Python ends, until gloo's threads have nothing in hand.

    They sleep for want of work or for Python's lock; while this sleeps, they get that.
    """
    end, quiet = time.monotonic() + LIMIT, 0
    while quiet < QUIET and time.monotonic() < end:
        quiet = quiet + 1 if all(state == "S" for state in _states()) else 0
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
