"""A claim on a file: one process works on the file, and may be killed at any time.

A claim is a small file beside the claimed one. It names its process and the number of bytes that
the process is about to write. It is valid while that process is alive. A process of another machine
or PID namespace cannot be checked: it counts as alive while its file is young.
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

YOUNG = 600.0  # seconds; longer than the default of data.retry_seconds
MACHINE, SPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def mark() -> str:
    """This process's mark in claims and part files: PID, start time and PID namespace."""
    return _mark(os.getpid())


@functools.cache
def _mark(pid: int) -> str:
    return f"{pid}-{start_of(pid)}-{_space()}"


def _space() -> str:
    """The machine and the PID namespace, in which a PID is unique."""
    words = [os.uname().nodename]
    with contextlib.suppress(OSError):
        words = [MACHINE.read_text(), str(SPACE.readlink())]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]


def lives(who: str, file: Path, young: float = YOUNG) -> bool:
    """Whether the process with a mark is alive.

    Args:
        who: the mark.
        file: a file that the process writes.
        young: seconds since its last write for which a process of another PID namespace counts as
            alive.
    """
    pid, _, rest = who.partition("-")
    start, _, space = rest.partition("-")
    if space == mark().rpartition("-")[2]:
        return bool(start) and start_of(int(pid)) == start
    with contextlib.suppress(OSError):
        return time.time() - file.stat().st_mtime < young
    return False


def holder(claim: Path) -> tuple[str, int]:
    """The mark of a claim's process and its number of bytes; "" and 0 without a claim."""
    with contextlib.suppress(OSError, ValueError):
        who, size, _ = claim.read_text().split()
        return who, int(size)
    return "", 0


def held(claim: Path) -> bool:
    """Whether a living process holds the claim."""
    return lives(holder(claim)[0], claim)


def take(claim: Path, size: int = 0) -> str:
    """Make a claim and return its text, or "" while another living process holds it.

    Two processes that replace a killed process's claim at once may both get it: their work must be
    correct also if it is done twice.

    Raises:
        OSError: the claim cannot be written.
    """
    if held(claim):
        return ""
    text = f"{mark()} {size} {token(4)}"
    aside = claim.with_name(f".{claim.name}.{mark()}.{token(4)}.part")
    try:
        aside.write_text(text)
        try:
            os.link(aside, claim)  # atomic: no reader sees an empty claim
        except FileExistsError:
            if held(claim):
                return ""
            aside.replace(claim)
        return text if claim.read_text() == text else ""
    finally:
        aside.unlink(missing_ok=True)


def drop(claim: Path, text: str) -> None:
    """Remove a claim if it still has this text."""
    with contextlib.suppress(OSError):
        if claim.read_text() == text:
            claim.unlink()
