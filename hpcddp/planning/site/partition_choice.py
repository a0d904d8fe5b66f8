"""The partition for training, and who may use one, by the facts of a cluster."""

from __future__ import annotations

import grp
import os
import re
from collections.abc import Iterator
from typing import Any

from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.slurm.partitions import Partition
from hpcddp.slurm.time_limit import seconds

# Features that name a GPU, where a site has no generic resource for it.
GPU_FEATURE = re.compile(
    r"(?:gpu|a100|a40|a30|a10|v100|h100|h200|b200|gh200|gb200|l40s?|l4|t4|p100|k80|mi\d{2,3}[ax]?"
    r"|rtx\w+)(?:[-_].*)?",
    re.IGNORECASE,
)
# Names of partitions for short trials: never the guess for training.
TRIAL = re.compile(r"debug|test|dev|interactive|inter|short|quick|express|preempt", re.IGNORECASE)


def best_partition(facts: SiteFacts) -> tuple[Partition | None, str]:
    """The partition for training, and why; None where no partition can be used."""
    usable = [row for row in facts.partitions if row.open and allowed(facts, row)]
    with_gpus = [row for row in usable if _gpu_nodes(facts, row)]
    default = next((row for row in usable if row.default), None)
    if default and (default in with_gpus or not with_gpus):
        return default, "the default partition"
    if not with_gpus:
        return (usable[0], "guess: there is no default partition") if usable else (None, "")
    ranked = sorted(with_gpus, key=lambda row: _rank(facts, row))
    others = ", ".join(row.name for row in ranked[1:])
    reason = "guess: " + (f"the default, {default.name}, has no GPUs" if default else "no default")
    return ranked[0], reason + (f"; others with GPUs: {others}" if others else "")


def allowed(facts: SiteFacts, partition: Partition) -> bool:
    """Whether the user's groups and accounts may use a partition, as far as Slurm says."""
    admits = not facts.associations or bool(accounts_for(facts, partition))
    return admits and in_groups(partition)


def in_groups(partition: Partition) -> bool:
    """Whether a partition admits one of the user's groups."""
    return not partition.groups or not {*partition.groups}.isdisjoint(_own_groups())


def accounts_for(facts: SiteFacts, partition: Partition | None) -> list[str]:
    """The user's accounts for jobs in a partition, the best guess first."""
    rows = [row for row in facts.associations if row.usable]
    names = {row.account for row in rows if not partition or row.partition in ("", partition.name)}
    if partition and partition.accounts:
        names &= set(partition.accounts)
    names -= set(partition.denied_accounts) if partition else set()
    gpus = bool(partition and _gpu_nodes(facts, partition))
    wanted, other = ("gpu", "cpu") if gpus else ("cpu", "gpu")

    def rank(name: str) -> tuple[bool, bool, str]:
        return other in name and wanted not in name, name != facts.default_account, name

    return sorted(names, key=rank)


def _own_groups() -> Iterator[str]:
    for number in {os.getgid(), *os.getgroups()}:
        try:
            yield grp.getgrgid(number).gr_name
        except KeyError:
            continue


def _rank(facts: SiteFacts, partition: Partition) -> tuple[Any, ...]:
    """Sorts the best first: not for trials, long, not preemptible, many GPUs."""
    limit = seconds(partition.max_time or "UNLIMITED", partition.name)
    return (
        bool(TRIAL.search(partition.name)),
        partition.hidden,
        limit < 3600,
        partition.preempt_mode not in ("", "OFF"),
        -_gpu_nodes(facts, partition),
        partition.name,
    )


def _gpu_nodes(facts: SiteFacts, partition: Partition) -> int:
    """GPUs of a partition on nodes that can run jobs."""
    kinds = facts.kinds_of(partition.name)
    return sum(max(gpus_of(kind), int(bool(gpu_feature(kind)))) * kind.usable for kind in kinds)


def gpus_of(kind: NodeKind) -> int:
    """GPUs of a node: whole ones, or slices where it has no whole ones."""
    whole = sum(row.count for row in kind.gpus if not row.sliced)
    return whole or kind.gpu_count


def gpu_feature(kind: NodeKind) -> str:
    """The feature that names the GPU of a kind without generic resources; "" without one."""
    if kind.gpus:
        return ""
    return next((name for name in kind.features if GPU_FEATURE.fullmatch(name)), "")
