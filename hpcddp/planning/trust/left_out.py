"""The nodes that a new job avoids, as the user's earlier runs had trouble with them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcddp.errors import TopologyError
from hpcddp.planning.asked import Asked
from hpcddp.planning.trust.node_book import NodeBook
from hpcddp.planning.trust.node_history import NodeHistory
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.slurm.node_kinds import NodeKind

SHARE = 10  # one of so many nodes is avoided at most, and one in any case


class LeftOut(NamedTuple):
    """A node that a job avoids, until when in seconds since the epoch, and why."""

    host: str
    until: float
    why: str

    def __str__(self) -> str:
        moment = time.strftime("%a %d %b %H:%M %Z", time.localtime(self.until))
        return f"{self.host}, until {moment}: {self.why}"


def of(
    asked: Asked, kinds: Sequence[NodeKind], cluster: str, environ: Mapping[str, str]
) -> list[LeftOut]:
    """The nodes to leave out, the worst first. Nothing is written: a plan may be for a dry run.

    Args:
        kinds: of nodes that the job can land on; if there are none, no node is left out.
        cluster: its name at Slurm.
        environ: the user's.
    """
    if not kinds:
        return []
    book, now = NodeBook.of(asked.profile, environ, cluster), time.time()
    bad = [history for history in book.up_to_date() if history.until(now) > now]
    return chosen(bad, kinds, asked, now) if bad else []


def chosen(
    bad: Sequence[NodeHistory], kinds: Sequence[NodeKind], asked: Asked, now: float
) -> list[LeftOut]:
    """Those of some nodes without which the job can still start.

    Args:
        bad: nodes that jobs avoid now.
    """
    options = asked.spec.slurm
    texts = [str(options.get(name, "")) for name in ("exclude", "nodelist")]
    if any("/" in text for text in texts):
        return []  # sbatch reads a file of names: no name can be added to it
    partitions = _partitions(kinds)
    hosts = set[str]().union(*(members for _, members in partitions))
    own, named = (set(_hosts(text)) for text in texts)
    rows: list[NodeHistory] = []
    for row in sorted(bad, key=lambda row: (-row.count(now), -row.until(now), row.host)):
        out = {row.host, *(other.host for other in rows)} | own
        starts = any(usable - len(out & members) >= asked.allocated.min
                     for usable, members in partitions)  # fmt: skip
        few = len(rows) < max(1, len(hosts) // SHARE)
        if row.host in hosts - own - named and starts and few:
            rows.append(row)
    return [LeftOut(row.host, row.until(now), row.why(now)) for row in rows]


def _partitions(kinds: Sequence[NodeKind]) -> list[tuple[int, set[str]]]:
    """The number of usable nodes and all hosts of each partition: a job starts in one of them, and
    a node may be in several."""
    usable, hosts = Counter[str](), defaultdict[str, set[str]](set)
    for kind in kinds:
        usable[kind.partition] += kind.usable
        hosts[kind.partition].update(_hosts(kind.hosts))
    return [(usable[name], hosts[name]) for name in hosts]


def _hosts(text: str) -> list[str]:
    """The names in a host list; none in what is no list."""
    try:
        return expand_hosts(text)
    except TopologyError:
        return []
