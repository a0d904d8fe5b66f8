"""Why an attempt failed, and who failed first: what a rank wrote down, or else what the log says.

A rank that is killed writes nothing. Its neighbours lose it, and what one of them writes of that is
no cause: then the log is asked who failed first.
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

TAIL = 1 << 18  # bytes of a log that are read: a traceback of each of many ranks
LAST = 10  # lines of a rank behind the traceback of the exception that ended it
LONG = 200  # characters of a line that are shown
# What ended a rank, as srun or our launchers say it, and what that may mean.
MAYBE_OOM = " was killed: out of memory?"
MAYBE_FULL = " was ended by SIGBUS: is a disk or /dev/shm full?"
ENDED = {"Killed": MAYBE_OOM, "SIGKILL": MAYBE_OOM, "Bus error": MAYBE_FULL, "SIGBUS": MAYBE_FULL}


class Failed(NamedTuple):
    """The rank that failed first, or the nodes."""

    rank: int | None  # None is all that is on ``host``, a host list
    host: str  # "" where the log does not say
    what: str  # what became of it, as it goes on after its name

    def __str__(self) -> str:
        name = "" if self.rank is None else f"rank {self.rank}"
        return " on ".join(filter(None, (name, self.host))) + self.what


def kind(
    run: RunDir, mine: ledger.Attempt, job: JobRecord, failure: Mapping[str, Any], code: int
) -> str:
    """The kind of an attempt's failure, for the decision on what follows; see error_record.py.

    A mistake would come again. It is one only where no ranks have met since a person last submitted
    the run, and where all ranks have failed in the same way: else it is a crash of that node. A
    program writes nothing down: the last lines of its ranks tell.
    """
    written = str(failure.get("kind", "crash")) if failure else ""
    program = bool(job.spec.get("command"))
    whole = bool(failure) and failure.get("rank") is None  # a word on all of them
    if whole and written == "mistake" and rendezvous.met_since(run, mine, program=program):
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
    """Whether the ranks on all nodes have ended with the same last line, of a program that was
    never right. Those that another one's end has ended early have said nothing: then the attempt
    before has ended so too."""
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
    # The same ranks are of the same node, it may be, which lacks what the others have.
    return {*earlier.values()} == {*last.values()} and not earlier.keys() & last.keys()


def _last_lines(run: RunDir, number: int) -> dict[int, str]:
    """The last line of each rank that has said something, by rank."""
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
    """Who failed first, as an attempt's log tells it.

    Args:
        job: the run's, if it has been read already.
    """
    text = log_reader.tail(run.attempt(number).log, size=TAIL)
    if not text:
        return None
    # Else srun counts what starts the ranks of a node.
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
    """The nodes that failed: srun says so before it ends the ranks on the others."""
    with contextlib.suppress(TopologyError):  # a line of that kind which is not srun's
        if (match := log_reader.NODE.search(text)) and count_hosts(match[1]):
            return Failed(None, match[1], " failed")
    return None


def killed(text: str, one_each: bool = True) -> Failed | None:
    """The first rank that was killed, or lost a page of its memory, as the launcher says it; its
    neighbours only complain.

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
    """Whether srun itself killed a rank that it names at this place of the log.

    So it is where another rank had left before, and has lines of its own, none of which says that
    it lost its peer.
    """
    left = [match[2] for match in log_reader.EXITED.finditer(text, 0, at)]
    own = {rank: [line for r, line in log_reader.LINE.findall(text) if r == rank] for rank in left}
    alone = [lines for lines in own.values() if lines and not any(map(log_reader.lost_peer, lines))]
    return bool(alone or (left and raised(text)))


def raised(text: str) -> Failed | None:
    """The exception that ended the rank which had one first, but for those of ranks that only lost
    another one."""
    ends: dict[str, tuple[int, str]] = {}  # rank -> its newest traceback's last line, and where
    count: Counter[str] = Counter()
    inside = set()
    for rank, line in log_reader.LINE.findall(text):
        count[rank] += 1
        if line.startswith(log_reader.TRACEBACK):
            inside.add(rank)
        elif rank in inside and line[:1].strip():  # what is indented belongs to the traceback
            inside.discard(rank)
            if log_reader.RAISED.match(line) and not log_reader.lost_peer(line):
                ends[rank] = count[rank], line
    for rank, (at, line) in ends.items():
        if count[rank] - at < LAST:  # and not one that the script went on from
            return Failed(int(rank), "", f": {line[:LONG]}")
    return None


def aborted(text: str) -> Failed | None:
    """The rank that a thread of gloo ended when Python was leaving: hpcddp.gloo has why."""
    match = log_reader.ABORTED.search(text)
    if not match:
        return None
    what = (
        " was ended by a thread of gloo that outlived Python: hpcddp in the Python of the script "
        "lets it come to rest first, and so does ending the process group"
    )
    return Failed(int(match[1]), "", what)


def left(text: str) -> Failed | None:
    """The first rank that just left, as srun says it."""
    match = log_reader.EXITED.search(text)
    if not match:
        return None
    what = f" left with exit code {match[3]}{_last(text, match[2])}"
    return Failed(int(match[2]), match[1], what)


def _last(text: str, rank: str | None = None) -> str:
    """The last line of a rank, or of all."""
    lines = [
        (r, line) for r, line in log_reader.LINE.findall(text) if line.strip() and rank in (None, r)
    ]
    return f"; rank {lines[-1][0]}'s last line: {lines[-1][1].strip()[:LONG]}" if lines else ""
