"""Before submission: the limits of a partition, and what its nodes have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from hpcddp.planning.site import node_choice
from hpcddp.planning.site.partition_choice import in_groups
from hpcddp.planning.site.wanted import Problem, Wanted
from hpcddp.sizes import counted
from hpcddp.slurm import time_limit
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.slurm.partitions import Partition

CLOSED = {"DRAIN": "it accepts no jobs", "INACTIVE": "it accepts no jobs"}


def partition(wanted: Wanted, row: Partition, flags: Collection[str] | None) -> Iterator[Problem]:
    """Problems with the limits of a partition.

    Args:
        flags: of the job's QOS, some of which lift limits of partitions (sacctmgr(1)); None if
            unknown.
    """
    if why := CLOSED.get(row.state):
        yield Problem(
            f"partition {row.name} is {row.state}: {why}", "partition", "use another partition"
        )
    elif row.state != "UP":
        text = f"partition {row.name} is {row.state}"
        yield Problem(text, "partition", "the job waits until it is up", sure=False)
    if not in_groups(row):
        what = f"partition {row.name} is for other groups than yours"
        yield Problem(what, "partition", f"it is for {', '.join(row.groups[:8])}", sure=False)
    yield from _size(wanted, row, flags)
    yield from _time(wanted, row, flags)
    yield from _share(wanted, row)
    account = wanted.option("account")
    if account and _denied(account, row.accounts, row.denied_accounts):
        what = f"account {account} may not use partition {row.name}"
        hint = f"use one of {', '.join(row.accounts[:8])}" if row.accounts else "use another one"
        # Slurm also admits the accounts below those of its list.
        yield Problem(what, "account", hint, sure=_denied(account, (), row.denied_accounts))
    qos = wanted.option("qos")
    if qos and _denied(qos, row.qos, row.denied_qos):
        hint = f"use one of {', '.join(row.qos[:8])}" if row.qos else "use another one"
        yield Problem(f"QOS {qos} may not be used in partition {row.name}", "qos", hint)


def _lifted(flags: Collection[str] | None, flag: str) -> bool | None:
    """Whether the QOS lifts a limit of the partition; None if unknown."""
    return None if flags is None else flag in flags


def _size(wanted: Wanted, row: Partition, flags: Collection[str] | None) -> Iterator[Problem]:
    """The number of nodes."""
    most, lifted = row.max_nodes, _lifted(flags, "PartitionMaxNodes")
    if most is not None and wanted.nodes.min > most and not lifted:
        what = f"{wanted.nodes.min} nodes requested, but partition {row.name} allows {most} per job"
        yield Problem(what, "nodes", f"use --nodes {most} or fewer", sure=lifted is False)
    least, lifted = row.min_nodes, _lifted(flags, "PartitionMinNodes")
    if wanted.nodes.max < least and not lifted:
        what = f"{counted(wanted.nodes.max, 'node')} requested, but a job of partition {row.name} "
        what += f"has at least {least}"
        yield Problem(what, "nodes", f"use --nodes {least} or more", sure=lifted is False)


def _time(wanted: Wanted, row: Partition, flags: Collection[str] | None) -> Iterator[Problem]:
    """The time limit."""
    lifted = _lifted(flags, "PartitionTimeLimit")
    if not row.max_time or not wanted.option("time") or lifted:
        return
    if wanted.seconds > time_limit.seconds(row.max_time, row.name):
        what = f"time limit {wanted.option('time')} requested, but partition {row.name} allows "
        hint = f"use --time {row.max_time} or less"
        yield Problem(what + row.max_time, "time", hint, sure=lifted is False)


def _share(wanted: Wanted, row: Partition) -> Iterator[Problem]:
    """Memory and CPUs of a node that the partition gives a job."""
    of, most = row.max_memory
    if of == "node" and most and wanted.memory_mb > most:
        what = f"{wanted.memory} of memory per node requested, but partition {row.name} "
        option, share = wanted.memory_option
        hint = f"use --{option} {most // share}M or less"
        yield Problem(f"{what}allows {most} MB", option, hint)
    cpus = row.max_cpus_per_node
    if cpus and wanted.cpus > cpus:
        what = f"{counted(wanted.cpus, 'CPU')} per node requested, but partition {row.name} "
        yield Problem(f"{what}allows {cpus}", "cpus-per-task", "use fewer CPUs for each process")


def _denied(name: str, allowed: Collection[str], denied: Collection[str]) -> bool:
    """Whether a partition denies an account or a QOS; without a list it allows all. The case does
    not count."""
    words = [word.lower() for word in allowed]
    return name.lower() in map(str.lower, denied) or bool(words and name.lower() not in words)


class _Requirement(NamedTuple):
    """What each node of a job must have.

    Args:
        shown: what a node has of it, in words.
        hint: what to ask for, from the nodes that have the rest.
    """

    text: str
    key: str
    fits: Callable[[NodeKind], bool]
    shown: Callable[[NodeKind], str]
    hint: Callable[[Sequence[NodeKind]], str]


def _needs(wanted: Wanted) -> Iterator[_Requirement]:
    """What a job needs of each node, in the order in which it is told."""
    kind, gpus, memory = wanted.gpu_type, wanted.gpus, wanted.memory_mb
    option, share = wanted.memory_option
    if gpus and kind:
        yield _Requirement(
            f"GPUs of the type {kind}", "gpu_type", lambda node: node_choice.count(node, kind) > 0,
            lambda node: ", ".join(row.type for row in node.gpus if row.type),
            lambda nodes: "use one of these types, or another partition",
        )  # fmt: skip
    if gpus:
        yield _Requirement(
            f"{counted(gpus, 'GPU')} per node", "gpus",
            lambda node: node_choice.count(node, kind) >= gpus,
            lambda node: counted(node_choice.count(node, kind), "GPU"),
            lambda nodes: _most("--gpus", (node_choice.count(node, kind) for node in nodes)),
        )  # fmt: skip
    yield _Requirement(
        f"{counted(wanted.cpus, 'CPU')} per node", "cpus-per-task",
        lambda node: node.cpus >= wanted.cpus, lambda node: counted(node.cpus, "CPU"),
        lambda nodes: f"use at most {counted(max(node.cpus for node in nodes), 'CPU')} "
                      "for a node's processes",
    )  # fmt: skip
    yield _Requirement(
        f"{wanted.memory} of memory per node", option,
        lambda node: node.memory_mb >= memory,
        lambda node: f"{node.memory_mb / 1024:.0f} GB",
        lambda nodes: f"use --{option} {max(n.memory_mb for n in nodes) // share}M or less",
    )  # fmt: skip


def _most(option: str, counts: Iterator[int]) -> str:
    most = max(counts)
    return (
        f"use {option} {most} or fewer, or another partition" if most else "use another partition"
    )


def nodes(wanted: Wanted, where: str, kinds: Sequence[NodeKind]) -> Iterator[Problem]:
    """Problems with the nodes of the job's partitions.

    Args:
        where: names of the partitions.
    """
    have = list(kinds)
    for need in _needs(wanted):
        left = [kind for kind in have if need.fits(kind)]
        if not left:
            there = ", ".join(dict.fromkeys(filter(None, map(need.shown, have)))) or "none"
            what = f"{need.text} requested, but the nodes of partition {where} have {there}"
            yield Problem(what, need.key, need.hint(have))
            return
        have = left
    total, up = sum(kind.nodes for kind in have), sum(kind.usable for kind in have)
    least = counted(wanted.nodes.min, "node")
    if wanted.nodes.min > total:
        what = f"{least} requested, but partition {where} has {total} that fit the request"
        yield Problem(what, "nodes", f"use --nodes {total} or fewer")
    elif wanted.nodes.min > up:
        what = f"{least} requested, but {up} of {total} in partition {where} are up"
        yield Problem(what, "nodes", "the job waits until more are up", sure=False)
