"""Processes of this machine: their start, children and end (prctl(2), proc(5))."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, also after an exec (prctl(2))."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Let orphans of this process's children become its own children (prctl(2))."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children(parent: int) -> list[int]:
    """The child processes of a process (proc(5), stat)."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                pids.append(int(path.parent.name))
    return pids


def start_of(pid: int) -> str:
    """The start of a process, in clock ticks since boot; "" if it ended (proc(5), stat)."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else rest[18]


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal (proc(5), status)."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        mask = status.partition("SigIgn:")[2].split()[0]
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False
