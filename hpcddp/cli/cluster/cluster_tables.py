"""The facts of a cluster and the values of a profile, for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from hpcddp.cli.terminal import tables
from hpcddp.keys import Key
from hpcddp.planning.clusters import KEYS, Profile
from hpcddp.planning.site.site_facts import SiteFacts, stamp
from hpcddp.sizes import counted
from hpcddp.slurm.accounts import Qos
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.slurm.partitions import Partition

MOST = 12  # features that are named
HEAD = ("PARTITION", "NODES", "GPUS", "CPUS", "MEMORY", "LIMIT", "PREEMPTION")


def profile(loaded: Profile) -> Iterator[str]:
    """The values of a profile that are set."""
    values = KEYS.flatten(asdict(loaded.cluster))
    rows = [(name, json.dumps(value)) for name, value in values.items() if _is_set(name, value)]
    named = [("profile", loaded.name), ("file", str(loaded.path))]
    yield from tables.fields([*named, *rows], whole=["file"])


def _is_set(name: str, value: object) -> bool:
    row: Key | None = KEYS.rows.get(name)
    return row is None or value != row.default


def summary(facts: SiteFacts) -> Iterator[str]:
    """The cluster, its partitions, and the user's accounts."""
    rows = [
        ("cluster", facts.cluster or "unknown"),
        ("Slurm", facts.version or "unknown"),
        ("read", stamp(facts.read)),
    ]
    accounts = [f"{row.account} (default)" if row.default else row.account
                for row in facts.associations]  # fmt: skip
    rows += [("accounts", ", ".join(dict.fromkeys(accounts)))] if accounts else []
    qos = dict.fromkeys(name for row in facts.associations for name in row.qos)
    limits = {row.name: _limits(row) for row in facts.qos}
    rows += [("QOS", name + limits.get(name, "")) for name in qos]
    rows += [("budget", str(row)) for row in facts.budgets]
    rows += [*_nodes(facts), *_reserved(facts)]
    rows += [("tried", text) for text in facts.tried]
    yield from tables.fields(rows)
    yield ""
    cells = [_cells(row, kinds) for row in facts.partitions
             for kinds in _alike(facts.kinds_of(row.name))]  # fmt: skip
    if cells:
        yield from tables.table([HEAD, *cells], right=(1,))


def _limits(qos: Qos) -> str:
    """The limits of a QOS, behind its name."""
    tres = {"a job": qos.max_tres, "a user": qos.user_tres, "all jobs": qos.group_tres}
    texts = [f"{owner} at most {', '.join(f'{name}={n}' for name, n in most.items())}"
             for owner, most in tres.items() if most]  # fmt: skip
    texts += [f"at most {qos.max_wall} long"] if qos.max_wall else []
    return f" ({'; '.join(texts)})" if texts else ""


def _nodes(facts: SiteFacts) -> Iterator[tuple[str, str]]:
    """Features of the nodes, their CPUs, their network, and how Slurm tracks processes."""
    features = dict.fromkeys(name for kind in facts.kinds for name in kind.features)
    if features:
        more = f", and {len(features) - MOST} more" if len(features) > MOST else ""
        yield "features", ", ".join(list(features)[:MOST]) + more
    if machines := facts.architectures():
        yield "CPUs", ", ".join(sorted(machines))
    plugin = facts.config.get("TopologyPlugin", "").rpartition("/")[2]
    if plugin not in ("", "none", "default", "flat"):
        yield "topology", plugin
    if facts.nodes:
        yield "nodes", facts.nodes
    if tracks := facts.config.get("ProctrackType", "").rpartition("/")[2]:
        yield "processes", f"tracked by {tracks}"


def _reserved(facts: SiteFacts) -> Iterator[tuple[str, str]]:
    """Maintenance windows, and other reservations."""
    for window in facts.reservations:
        times = f"{stamp(window.start)} to {stamp(window.end)}, {window.hosts or 'all nodes'}"
        name = "" if window.maintenance else f", {window.name}"
        yield "closed" if window.maintenance else "reserved", times + name


def _alike(kinds: list[NodeKind]) -> list[list[NodeKind]]:
    """Kinds that differ only in what the table does not show, together."""
    groups: dict[tuple[object, ...], list[NodeKind]] = {}
    for kind in kinds:
        groups.setdefault((kind.gpus, kind.cpus, kind.memory_mb), []).append(kind)
    return list(groups.values())


def _cells(partition: Partition, kinds: list[NodeKind]) -> tuple[str, ...]:
    """Nodes of a partition that are alike."""
    kind, nodes = kinds[0], sum(row.nodes for row in kinds)
    gpus = " + ".join(f"{row.count} {row.type}".strip() for row in kind.gpus)
    gone = nodes - sum(row.usable for row in kinds)
    mode = partition.preempt_mode
    grace = f", {counted(partition.grace, 's', 's')} grace" if partition.grace else ""
    return (
        partition.name + "*" * partition.default,
        f"{nodes}" + (f" ({gone} down)" if gone else ""),
        gpus or "-",
        str(kind.cpus),
        f"{kind.memory_mb / 1024:.0f} GB",
        partition.max_time or "none",
        f"{mode.lower()}{grace}" if mode not in ("", "OFF") else "-",
    )
