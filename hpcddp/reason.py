"""Why an attempt failed, in one line: what a rank wrote down, or else what its log says."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from pathlib import Path

from hpcddp import ledger, record
from hpcddp.failure import LOST_PEER, is_peer
from hpcddp.rundir import RunDir, read_json

TAIL = 1 << 18  # bytes of a log that are read: a traceback of each of many ranks
LAST = 10  # lines of a rank behind the traceback of the exception that ended it
LONG = 200  # characters of a line that are shown
# A launcher puts the rank before a line, and torch puts it before a traceback's once more.
LINE = re.compile(r"^ *(\d+): (?:\[rank\d+\]: ?)?(.*)$", re.M)
RAISED = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
ABORTED = re.compile(r"^ *(\d+): terminate called without an active exception$", re.M)
EXITED = re.compile(r"^srun: error: (\S+): task (\d+): Exited with exit code (\d+)", re.M)
KILLED = (
    (re.compile(r"^srun: error: (\S+): tasks? (\d+): Killed", re.M), "rank {1} on {0}"),
    (re.compile(r"^(?: *\d+: )?hpcddp: (rank \d+ on \S+) was ended by SIGKILL", re.M), "{0}"),
)


def of(run: RunDir, attempt: ledger.Attempt) -> str:
    """Why an attempt failed."""
    error = read_json(run.attempt(attempt.number).error)
    if not error or is_peer(error):
        text = _tail(run.attempt(attempt.number).log)
        one_each = record.read(run).launcher not in ("fork", "torchrun")
        first = killed(text) or raised(text) or aborted(text) or (left(text) if one_each else "")
        if first or not error:
            return first or f"exit code {attempt.exit_code}{_last(text) or '; the log is empty'}"
    message = error["message"].partition("\n")[0]
    who = "" if error["rank"] is None else f"rank {error['rank']} on {error['host']}: "
    return f"{who}{error['type']}: {message}"


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - TAIL))
        return f.read().decode("utf-8", "replace")
    return ""


def killed(text: str) -> str:
    """The first rank that was killed, as the launcher says it; its neighbours only complain."""
    for pattern, who in KILLED:
        if found := pattern.search(text):
            return f"{who.format(*found.groups())} was killed: out of memory?"
    return ""


def raised(text: str) -> str:
    """The exception that ended the rank which had one first, but for those of ranks that only lost
    another one."""
    ends: dict[str, tuple[int, str]] = {}  # rank -> its newest traceback's last line, and where
    count: Counter[str] = Counter()
    inside = set()
    for rank, line in LINE.findall(text):
        count[rank] += 1
        if line.startswith("Traceback (most recent call last)"):
            inside.add(rank)
        elif rank in inside and line[:1].strip():  # what is indented belongs to the traceback
            inside.discard(rank)
            if RAISED.match(line) and not LOST_PEER.search(line):
                ends[rank] = count[rank], line
    for rank, (at, line) in ends.items():
        if count[rank] - at < LAST:  # and not one that the script went on from
            return f"rank {rank}: {line[:LONG]}"
    return ""


def aborted(text: str) -> str:
    """The rank that a thread of gloo ended when Python was leaving: hpcddp.gloo has why."""
    found = ABORTED.search(text)
    if not found:
        return ""
    return (
        f"rank {found[1]} was ended by a thread of gloo that outlived Python: install hpcddp "
        "in the Python that runs the script, which then waits for it"
    )


def left(text: str) -> str:
    """The first rank that just left, as srun says it."""
    found = EXITED.search(text)
    if not found:
        return ""
    return f"rank {found[2]} on {found[1]} left with exit code {found[3]}{_last(text, found[2])}"


def _last(text: str, rank: str | None = None) -> str:
    """The last line of a rank, or of all."""
    lines = [(r, line) for r, line in LINE.findall(text) if line.strip() and rank in (None, r)]
    return f"; rank {lines[-1][0]}'s last line: {lines[-1][1].strip()[:LONG]}" if lines else ""
