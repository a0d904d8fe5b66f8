"""Why an attempt failed, and which rank failed first: by a rank's record, else by the log.

A killed rank writes no record, and the records of ranks that lost it show no cause: then the log
shows which rank failed first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcddp import record
from hpcddp.attempt import decision, launch_facts, ledger, log_reader, rendezvous
from hpcddp.attempt.error_record import is_peer, is_shared
from hpcddp.errors import TopologyError
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, read_json, read_step
from hpcddp.slurm.hostlist import count_hosts

TAIL = 1 << 18  # bytes of a log to read: a traceback of each of many ranks
LAST = 10  # most lines of a rank after the traceback that ended it
LONG = 200  # characters of a line to show
# How srun or our launchers name the end of a rank, and what it may mean.
MAYBE_OOM = " was killed: out of memory?"
MAYBE_FULL = " was ended by SIGBUS: is a disk or /dev/shm full?"
ENDED = {"Killed": MAYBE_OOM, "SIGKILL": MAYBE_OOM, "Bus error": MAYBE_FULL, "SIGBUS": MAYBE_FULL}


class Failed(NamedTuple):
    """The rank that failed first, or the nodes."""

    rank: int | None  # None: all ranks on ``host``, a host list
    host: str  # "" if unknown
    what: str  # what happened, to be appended to its name

    def __str__(self) -> str:
        name = "" if self.rank is None else f"rank {self.rank}"
        return " on ".join(filter(None, (name, self.host))) + self.what


def kind(
    run: RunDir, mine: ledger.Attempt, job: JobRecord, failure: Mapping[str, Any], code: int
) -> str:
    """The kind of an attempt's failure, for the decision; see error_record.py.

    A mistake would recur. It counts as one only if no ranks have reached the rendezvous since the
    run was last submitted, and if all ranks failed in the same way: else it is a crash. One that is
    recorded for all ranks may follow their own rendezvous. A program has no record: the last lines
    of its ranks are compared.
    """
    written = str(failure.get("kind", "crash")) if failure else ""
    program = bool(job.spec.get("command"))
    whole = bool(failure) and failure.get("rank") is None  # about all of them
    if whole and written == "mistake" and rendezvous.met_since(run, mine, program=False):
        return "crash"
    if not code or whole or written not in ("mistake", *([""] if program else [])):
        return written
    if read_step(run.attempt(mine.number))[0]:
        return "crash" if written else ""
    same = is_shared(run.attempt(mine.number)) or (program and alike(run, mine, job))
    if same and not rendezvous.met_since(run, mine, program=program):
        return "mistake"
    return "crash" if written else ""


def alike(run: RunDir, mine: ledger.Attempt, job: JobRecord) -> bool:
    """Whether the ranks on all nodes ended with the same last line, of a program that cannot run.
    If ranks were ended before they wrote it, the last attempt must have ended with it too."""
    last = _last_lines(run, mine.number)
    nodes = {rank // job.gpus_per_node for rank in last}
    most = count_hosts(mine.nodes) if mine.slurm else job.nodes[1]
    if len({*last.values()}) != 1 or not all(map(log_reader.WRONG.match, last.values())):
        return False
    if len(nodes) >= most:
        return True
    before = ledger.read(run.attempt(mine.number - 1)) if mine.number > 1 else None
    since = (read_json(run.submission) or {}).get("submitted", 0.0)
    if before is None or before.cause != decision.CRASH or before.began < since:
        return False
    earlier = _last_lines(run, before.number)
    # The same ranks may have been on one bad node.
    return {*earlier.values()} == {*last.values()} and not earlier.keys() & last.keys()


def _last_lines(run: RunDir, number: int) -> dict[int, str]:
    """The last line of each rank that has written any."""
    text = log_reader.tail(run.attempt(number).log, size=TAIL)
    return {int(r): line.strip() for r, line in log_reader.LINE.findall(text) if line.strip()}


def of(run: RunDir, attempt: ledger.Attempt) -> str:
    """Why an attempt failed."""
    error = read_json(run.attempt(attempt.number).error)
    if not error or is_peer(error):
        if first := failed(run, attempt.number):
            return str(first)
        if not error:
            text = log_reader.tail(run.attempt(attempt.number).log, size=TAIL)
            return f"exit code {attempt.exit_code}{_last(text) or '; the log is empty'}"
    message = error["message"].partition("\n")[0]
    who = "" if error["rank"] is None else f"rank {error['rank']} on {error['host']}: "
    return f"{who}{error['type']}: {message}"


def failed(run: RunDir, number: int, job: JobRecord | None = None) -> Failed | None:
    """Which rank or node failed first, by an attempt's log.

    Args:
        job: the run's record, if already read.
    """
    text = log_reader.tail(run.attempt(number).log, size=TAIL)
    if not text:
        return None
    # Else srun's tasks are nodes.
    job = job or record.read(run)
    one_each = not launch_facts.of(job.launcher, job.launch).get("per_node")
    return (
        _node(text)
        or killed(text, one_each)
        or raised(text)
        or aborted(text)
        or (left(text) if one_each else None)
    )


def _node(text: str) -> Failed | None:
    """The nodes that failed: srun names them before it ends the other ranks."""
    with contextlib.suppress(TopologyError):  # a similar line that is not srun's
        if (match := log_reader.NODE.search(text)) and count_hosts(match[1]):
            return Failed(None, match[1], " failed")
    return None


def killed(text: str, one_each: bool = True) -> Failed | None:
    """The first rank that the launcher reports as killed or ended by SIGBUS; others only lost it.

    Args:
        one_each: a task of srun is a rank.
    """
    match = log_reader.BY_SRUN.search(text) if one_each else None
    if match and not _ended_for_another(text, match.start()):
        return Failed(int(match[2]), match[1], ENDED[match[3]])
    match = log_reader.BY_OURS.search(text)
    if match and not raised(text[: match.start()]):
        return Failed(int(match[1]), match[2], ENDED[match[3]])
    return None


def _ended_for_another(text: str, at: int) -> bool:
    """Whether srun itself killed the rank that it names at this position of the log.

    It did if another rank had left before whose lines do not say that it lost its peer.
    """
    left = [match[2] for match in log_reader.EXITED.finditer(text, 0, at)]
    own = {rank: [line for r, line in log_reader.LINE.findall(text) if r == rank] for rank in left}
    alone = [lines for lines in own.values() if lines and not any(map(log_reader.lost_peer, lines))]
    return bool(alone or (left and raised(text)))


def raised(text: str) -> Failed | None:
    """The first exception that ended a rank, except in ranks that only lost another one."""
    ends: dict[str, tuple[int, str]] = {}  # rank -> its newest traceback's last line, and where
    count: Counter[str] = Counter()
    inside = set()
    for rank, line in log_reader.LINE.findall(text):
        count[rank] += 1
        if line.startswith(log_reader.TRACEBACK):
            inside.add(rank)
        elif rank in inside and line[:1].strip():  # indented lines belong to the traceback
            inside.discard(rank)
            if log_reader.RAISED.match(line) and not log_reader.lost_peer(line):
                ends[rank] = count[rank], line
    for rank, (at, line) in ends.items():
        if count[rank] - at < LAST:  # else the script continued after it
            return Failed(int(rank), "", f": {line[:LONG]}")
    return None


def aborted(text: str) -> Failed | None:
    """The rank that a thread of gloo ended at Python's exit: see hpcddp.gloo."""
    match = log_reader.ABORTED.search(text)
    if not match:
        return None
    what = (
        " was ended by a thread of gloo at Python's exit: end the process group in the script, or "
        "install hpcddp in its Python"
    )
    return Failed(int(match[1]), "", what)


def left(text: str) -> Failed | None:
    """The first rank that exited with an error, by srun's message."""
    match = log_reader.EXITED.search(text)
    if not match:
        return None
    what = f" ended with exit code {match[3]}{_last(text, match[2])}"
    return Failed(int(match[2]), match[1], what)


def _last(text: str, rank: str | None = None) -> str:
    """The last line of a rank, or of all."""
    lines = [
        (r, line) for r, line in log_reader.LINE.findall(text) if line.strip() and rank in (None, r)
    ]
    return f"; rank {lines[-1][0]}'s last line: {lines[-1][1].strip()[:LONG]}" if lines else ""
