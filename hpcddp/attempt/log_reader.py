"""Patterns of a job's log: which rank wrote a line, why Slurm ended the job, how a rank ended.

The lines are Slurm's, a launcher's or the program's. joblog.py has those of hpcddp, which a batch
script does not need. ``first_failure`` finds by them which rank failed first.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from hpcddp.attempt import decision
from hpcddp.attempt.error_record import LOST_PEER
from hpcddp.attempt.ledger import Attempt

TAIL = 1 << 16  # bytes of a log to search

# A launcher puts the rank before a line, and torch puts it before a traceback's lines once more.
# srun also puts it before Slurm's message about the rank's end.
LINE = re.compile(r"^ *(\d+): (?!slurmstepd)(?:\[rank\d+\]: ?)?(.*)$", re.M)

# srun's messages about the end of a rank or node. Groups: host, rank, exit code or signal.
EXITED = re.compile(r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: Exited with exit code (\d+)", re.M)
BY_SRUN = re.compile(r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (Killed|Bus error)", re.M)
NODE = re.compile(r"^srun: error: Node failure on (\S+)", re.M)
# The same about any failed task: an exit code, or the description of a signal.
_LEFT = re.compile(
    r"^srun: error: \S+: tasks? \S+: (?:Exited with exit code (\d+)|(.+?)(?: \(core dumped\))?)$",
    re.M,
)
_SIGNALS = {signal.strsignal(number): 128 + number for number in signal.valid_signals()}
# Our launchers' message: ``joblog.rank_ended``. Groups: rank, host, signal.
BY_OURS = re.compile(
    r"^(?: *\d+: )?hpcddp: rank (\d+) on (\S+) was ended by (SIGKILL|SIGBUS)", re.M
)

# The last lines of programs. ABORTED is from C++, with the rank before it.
TRACEBACK = "Traceback (most recent call last)"
RAISED = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
ABORTED = re.compile(r"^ *(\d+): terminate called without an active exception$", re.M)
# Last lines of a program that cannot run: they would recur.
WRONG = re.compile(
    r"(ModuleNotFound|Import|Syntax|Indentation|Tab|Name|Attribute|Type)Error\b"
    r"|.*(: can't open file |: No such file or directory$|: command not found$)"
)
# Messages of Slurm and the kernel that a cgroup had no memory left.
CGROUP_OOM = ("oom_kill", "oom-kill", "Out Of Memory")

# slurmstepd's message when it ends a job. For scancel it has nothing after the time; nor for a TERM
# to the batch script alone, which ends nothing: a later message about a step may have a reason.
# Groups: job or step, id, reason.
_ENDED = re.compile(
    r"\*\*\* (JOB|STEP) (\d+)\S* ON \S+ CANCELLED AT [^\s*,]+(?: DUE TO ([A-Z ]*[A-Z]))?"
)
_CAUSES = {row.words: name for name, row in decision.CAUSES.items() if row.words}


def lost_peer(line: str) -> bool:
    """Whether a rank says that it has lost another one."""
    return bool(LOST_PEER.search(line))


def tail(path: Path, start: int = 0, size: int = TAIL) -> str:
    """The last `size` bytes of a file, not before `start`."""
    with contextlib.suppress(OSError), path.open("rb") as f:
        f.seek(max(start, f.seek(0, os.SEEK_END) - size))
        return f.read().decode("utf-8", "replace")
    return ""


def first_code(log: str, code: int) -> int:
    """The exit code of the task that srun names first; else `code`."""
    first = _LEFT.search(log)
    if first is None:
        return code
    return int(first[1]) if first[1] else _SIGNALS.get(first[2], code)


def ending(log: str, number: str = "") -> str:
    """Why Slurm ended a job, by its last message in the log: a cause, or "" if it did not.

    Args:
        number: of the job, if several share the log; else any.
    """
    lines = [(whose, why) for whose, job, why in _ENDED.findall(log) if number in ("", job)]
    jobs = [i for i, (whose, _) in enumerate(lines) if whose == "JOB"]
    if not jobs:
        return ""
    reason = lines[jobs[-1]][1] or next((why for _, why in lines[jobs[-1] :] if why), None)
    return _CAUSES.get(reason or "", decision.CANCELLED)


def ending_of(attempt: Attempt) -> str:
    """Why Slurm ended an attempt's job, by its message: a cause, or ""."""
    log = tail(Path(attempt.said), attempt.said_size) if attempt.said else ""
    if attempt.node_log and attempt.host == os.uname().nodename:
        log += tail(Path(attempt.node_log), attempt.node_log_size)
    return ending(log, attempt.said_id)


def sizes(attempt: Attempt) -> tuple[int, int]:
    """The current sizes of the files with Slurm's messages."""
    counts = [attempt.said_size, attempt.node_log_size]
    for i, path in enumerate((attempt.said, attempt.node_log)):
        with contextlib.suppress(OSError):
            counts[i] = Path(path).stat().st_size if path else 0
    return counts[0], counts[1]
