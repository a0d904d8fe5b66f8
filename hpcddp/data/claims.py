"""Who works on a file: a claim beside it, of a process that may be killed at any time.

A claim is a small file that says which process made it, and how many bytes it is about to write.
It holds while that process lives; what a killed one left counts for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

from hpcddp.ledger import process_start
from hpcddp.rundir import token


def mark() -> str:
    """This process, as the name of a part file says it: its id alone is no identity."""
    return _mark(os.getpid())


@functools.cache
def _mark(pid: int) -> str:
    return f"{pid}-{process_start(pid)}"


def lives(who: str) -> bool:
    """Whether a process by its mark is still there."""
    pid, _, start = who.partition("-")
    return pid.isdecimal() and bool(start) and process_start(int(pid)) == start


def holder(claim: Path) -> tuple[str, int]:
    """Who holds a claim, and for how many bytes; nobody if it is not there."""
    with contextlib.suppress(OSError, ValueError):
        who, size, _ = claim.read_text().split()
        return who, int(size)
    return "", 0


def held(claim: Path) -> bool:
    """Whether a living process holds it."""
    return lives(holder(claim)[0])


def take(claim: Path, size: int = 0) -> str:
    """Make a claim; its text, or "" while a living process holds it.

    Of two that find one of a killed process at once both may get it: what they do must be right
    also if it is done twice.

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
