"""Marks in the lines of ranks that show the supervisor which of them are the last ones."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from hpcddp.errors import TopologyError
from hpcddp.slurm.hostlist import expand_hosts

_END = re.compile(rb"\x1e(\d+) (\d+)")
_TASKS = re.compile(rb"srun: error: ([\w.\-\[\],]+): tasks? [\d,-]+: ")
NODE_FAILURE = b"srun: error: Node failure on "  # comes late, into the log of another attempt


def end_of_lines(attempt: int, node: int) -> bytes:
    """What follows, without a rank's label, on the last line of a node's ranks."""
    return f"\x1e{attempt} {node}".encode()


def hosts_of_ended_tasks(lines: Sequence[bytes]) -> set[str]:
    """The nodes of which srun says that a task has ended there by an error."""
    lists = [match[1].decode() for line in lines if (match := _TASKS.match(line))]
    with contextlib.suppress(TopologyError):
        return {host for hosts in lists for host in expand_hosts(hosts)}
    return set()


def sift(lines: Sequence[bytes], *, spares: bool) -> tuple[bytes, list[tuple[int, int]]]:
    """The text for the log, without marks; attempt and node of each mark.

    Args:
        spares: the job continues when a node is lost, and srun's words on it say nothing new.
    """
    kept, ended = [], []
    for line in lines:
        text = line
        if b"\x1e" in line:
            ended += [(int(attempt), int(node)) for attempt, node in _END.findall(line)]
            text = _END.sub(b"", line)
            if not text:
                continue
        if not (spares and text.startswith(NODE_FAILURE)):
            kept.append(text + b"\n")
    return b"".join(kept), ended
