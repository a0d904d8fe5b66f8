"""What a run met on its nodes, a line of JSON for each: RUN/nodes.jsonl.

The batch script's host writes it, at the end of an attempt as a rule, and rank 0 in the full
preflight. Later commands gather it from the runs of the user (planning/trust), and new jobs avoid
nodes that failed again and again.

    kind      meaning
    check     the node failed its checks, or is slow in two measurements
    failure   the node failed, by Slurm's message or srun's
    slow      a rank on it was slow by its own work: one measurement, which alone proves nothing
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp.attempt import decision, log_reader
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import TopologyError
from hpcddp.rundir import AttemptDir, RunDir, parse_lines, read_json
from hpcddp.slurm.hostlist import expand_hosts

CHECK, FAILURE, SLOW = "check", "failure", "slow"
KINDS = (CHECK, FAILURE, SLOW)
TAIL = 1 << 18  # bytes of a log with srun's message


class NodeEvent(NamedTuple):
    """Something that happened on a node.

    Args:
        source: the run and its attempt, RUN/N: one such event of each kind counts.
        time: in seconds since the epoch.
    """

    host: str
    kind: str
    what: str
    source: str
    time: float


def record_end(run: RunDir, mine: Attempt, cause: str) -> None:
    """Append what an attempt met."""
    if mine.slurm:
        append(run, mine.number, _met(run, mine, cause))


def record_checks(run: RunDir, number: int, faults: Mapping[str, Sequence[str]]) -> None:
    """Append the failed checks of an attempt that goes on all the same.

    Args:
        faults: host -> its faults, in words.
    """
    append(run, number, ((host, CHECK, ", ".join(texts)) for host, texts in faults.items()))


def append(run: RunDir, number: int, met: Iterable[tuple[str, str, str]]) -> None:
    """Append host, kind and text of each event; a full disk is no reason to stop."""
    source, now = f"{run.name}/{number}", time.time()
    events = [NodeEvent(host, kind, what, source, now) for host, kind, what in met]
    if not events:
        return
    lines = "".join(json.dumps(event._asdict()) + "\n" for event in events)
    with contextlib.suppress(OSError), run.node_events.open("a", encoding="utf-8") as file:
        file.write(lines)


def read(lines: Iterable[str | bytes]) -> Iterator[NodeEvent]:
    """The events in some lines; what is damaged, or of a later version, is left out."""
    for row in parse_lines(lines):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            texts = {name: str(row[name]) for name in NodeEvent._fields[:-1]}
            event = NodeEvent(**texts, time=float(row["time"]))
            if event.kind in KINDS:
                yield event


def _met(run: RunDir, mine: Attempt, cause: str) -> Iterator[tuple[str, str, str]]:
    """Host, kind and text of each event."""
    folder = run.attempt(mine.number)
    if cause == decision.BAD_NODE:
        for host, texts in ((read_json(folder.error) or {}).get("faults") or {}).items():
            yield host, CHECK, ", ".join(texts)
    if cause == decision.NODE:
        for host in _lost(folder.log) or _hosts(mine.nodes)[:1]:  # the first is the script's
            yield host, FAILURE, "the node failed"
    if cause == decision.LOST:
        for host in _hosts(str((read_json(folder.error) or {}).get("host", ""))):
            yield host, FAILURE, "the node gave no sign of life"
    for host, ratio in _slow(folder).items():
        yield host, SLOW, f"a rank took {ratio:.1f} times as long as the others"


def _lost(log: Path) -> list[str]:
    """The nodes that srun names as failed."""
    match = log_reader.NODE.search(log_reader.tail(log, size=TAIL))
    return _hosts(match[1]) if match else []


def _hosts(text: str) -> list[str]:
    try:
        return expand_hosts(text)
    except TopologyError:
        return []


def _slow(folder: AttemptDir) -> dict[str, float]:
    """The nodes of ranks that were slow by their own work, and how slow."""
    rows: dict[str, Any] = {}
    with contextlib.suppress(OSError), folder.metrics.open("rb") as file:
        for row in parse_lines(line for line in file if b'"slow"' in line):
            if row.get("event") == "slow" and row.get("what") == "compute" and row.get("host"):
                rows[str(row["host"])] = float(row.get("ratio") or 0)
    return rows
