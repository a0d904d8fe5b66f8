"""Processes of this machine: their start, children and end (prctl(2), proc(5)), the stack of this
one, and memory that they share."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MFD_CLOEXEC = 1
ROOM = 1 << 16  # slots of a frame in `with_room`, of 8 bytes each

T = TypeVar("T")


def with_room(call: Callable[[], T]) -> T:
    """Call a function in a stack with room for the frames of everything that it calls.

    CPython 3.11 and later keep frames in chunks of 16 KiB (Python/pystate.c). A call beyond the end
    of a chunk maps memory for another one and unmaps it on return: `import torch` does so 15,000
    times if its modules lie at the wrong depth. A frame of 512 KiB gets a chunk of 1 MiB, whose
    rest serves the calls below it. Memory that no frame has used costs nothing.
    """

    def roomy() -> T:
        return call()

    roomy.__code__ = roomy.__code__.replace(co_stacksize=ROOM)
    return roomy()


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, also after an exec (prctl(2))."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Let orphans of this process's children become its own children (prctl(2))."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def memory_file(name: str, *, inherited: bool = False) -> int:
    """Make a file in memory, `/memfd:NAME` in proc(5); returns its descriptor (memfd_create(2)).

    The Pythons of conda have no `os.memfd_create`, as they are built for an older C library than
    PyTorch needs.

    Args:
        inherited: programs that this process starts have the descriptor too.

    Raises:
        OSError: the kernel refuses.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.memfd_create(name.encode(), 0 if inherited else MFD_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return descriptor


def children(parent: int) -> list[int]:
    """The child processes of a process (proc(5), stat)."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                pids.append(int(path.parent.name))
    return pids


def named(name: str) -> list[int]:
    """The processes with a name (proc(5), comm)."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() == name:
                pids.append(int(path.parent.name))
    return pids


def start_of(pid: int) -> str:
    """The start of a process, in clock ticks since boot; "" if it ended (proc(5), stat)."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else rest[18]


def environ_of(pid: int) -> bytes:
    """The environment with which a process began, or replaced itself; b"" if it ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal (proc(5), status)."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        mask = status.partition("SigIgn:")[2].split()[0]
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False
