"""A claim on a file, beside it: its process works on the file, and may be killed at any time.

A claim is a small file that names the process that made it, and how many bytes it is about to
write. It holds while that process lives; that of a killed one counts for nothing. A process of
another machine or container cannot be seen from here: it counts as alive while its file is young.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from pathlib import Path

from hpcddp.processes import start_of
from hpcddp.rundir import token

YOUNG = 600.0  # seconds; longer than a store may be silent by default
MACHINE, SPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def mark() -> str:
    """This process, as the name of a part file says it: its id alone is no identity."""
    return _mark(os.getpid())


@functools.cache
def _mark(pid: int) -> str:
    return f"{pid}-{start_of(pid)}-{_space()}"


def _space() -> str:
    """The machine and the PID namespace, in which the id of a process is its own."""
    words = [os.uname().nodename]
    with contextlib.suppress(OSError):
        words = [MACHINE.read_text(), str(SPACE.readlink())]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]


def lives(who: str, file: Path, young: float = YOUNG) -> bool:
    """Whether a process by its mark is still there.

    Args:
        file: one that the process writes.
        young: seconds since its last write for which a process that cannot be seen from here lives.
    """
    pid, _, rest = who.partition("-")
    start, _, space = rest.partition("-")
    if space == mark().rpartition("-")[2]:
        return bool(start) and start_of(int(pid)) == start
    with contextlib.suppress(OSError):
        return time.time() - file.stat().st_mtime < young
    return False


def holder(claim: Path) -> tuple[str, int]:
    """The process that holds a claim, and for how many bytes; "" if it is not there."""
    with contextlib.suppress(OSError, ValueError):
        who, size, _ = claim.read_text().split()
        return who, int(size)
    return "", 0


def held(claim: Path) -> bool:
    """Whether a living process holds it."""
    return lives(holder(claim)[0], claim)


def take(claim: Path, size: int = 0) -> str:
    """Make a claim; its text, or "" while a living process holds it.

    Two processes that see the claim of a killed one at once may both get it: their work must be
    right also if it is done twice.

    Raises:
        OSError: nothing can be written there.
    """
    if held(claim):
        return ""
    text = f"{mark()} {size} {token(4)}"
    aside = claim.with_name(f".{claim.name}.{mark()}.{token(4)}.part")
    try:
        aside.write_text(text)
        try:
            os.link(aside, claim)  # with its text in it from the first instant on
        except FileExistsError:
            if held(claim):
                return ""
            aside.replace(claim)
        return text if claim.read_text() == text else ""
    finally:
        aside.unlink(missing_ok=True)


def drop(claim: Path, text: str) -> None:
    """Give a claim back, if it is still this one."""
    with contextlib.suppress(OSError):
        if claim.read_text() == text:
            claim.unlink()
