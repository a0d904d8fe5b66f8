"""From the facts of a cluster to the values of a profile, each with the reason for it.

A value that Slurm states is a fact, the others are guesses, and their comments say so.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hpcddp.planning.site import account_limits, node_choice
from hpcddp.planning.site.partition_choice import (
    GPU_FEATURE,
    TRIAL,
    accounts_for,
    best_partition,
    gpu_feature,
)
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.planning.site.wanted import Wanted
from hpcddp.sizes import NodeRange, counted
from hpcddp.slurm.node_kinds import Gpus, NodeKind
from hpcddp.slurm.partitions import Partition
from hpcddp.spec import JobSpec

# Names of QOS for ordinary jobs, and parts of the names of others.
USUAL = ("normal", "standard", "regular", "default", "batch")
LOW = re.compile(r"low|scav|idle|spare|overrun|large|high|long|serial", re.IGNORECASE)


# Parts of the facts -> the keys that rest on them.
RESTS_ON = {
    "partitions": {"gpu_option", "gpu_type", "cpus_per_gpu", "host_suffix", "slurm.partition",
                   "slurm.constraint", "slurm.account", "slurm.qos"},
    "nodes": {"gpu_option", "gpu_type", "cpus_per_gpu", "host_suffix", "slurm.partition",
              "slurm.constraint", "slurm.account", "slurm.qos"},
    "samples of nodes": {"cpus_per_gpu", "host_suffix"},
    "accounts": {"slurm.account", "slurm.qos"},
    "QOS": {"slurm.qos"},
}  # fmt: skip
BY_TRIALS = {"gpu_option", "slurm.partition", "slurm.account", "slurm.qos", "slurm.constraint",
             "slurm.time"}  # fmt: skip
NO_ACCOUNTING = "this Slurm has no accounting"


@dataclass(frozen=True)
class Choice:
    """A value of a profile.

    Args:
        key: dotted name, such as slurm.partition.
        comment: the reason, of one line.
    """

    key: str
    value: Any
    comment: str


def of(facts: SiteFacts) -> list[Choice]:
    """The values of a profile, in the order in which it has them."""
    partition, reason = best_partition(facts)
    kinds = facts.kinds_of(partition.name) if partition else []
    release = f"Slurm {facts.version}" if facts.version else "Slurm"
    title = f"{facts.cluster}: {release}" if facts.cluster else release
    rows = [Choice("description", title, "")]
    rows += _gpus(facts, partition, kinds)
    if facts.clusters:
        rows.append(Choice("slurm.clusters", facts.clusters, "not the cluster of your shell"))
    if partition and not partition.default:
        rows.append(Choice("slurm.partition", partition.name, reason))
    rows += _account(facts, partition)
    rows += _network(facts, kinds)
    return rows


def _network(facts: SiteFacts, kinds: list[NodeKind]) -> list[Choice]:
    """The suffix of a node's name on the network that Slurm uses."""
    nodes = [node for kind in kinds if (node := facts.sample(kind))]
    suffixes = {node.suffix for node in nodes}
    if len(suffixes) != 1 or suffixes == {""}:
        return []
    node = nodes[0]
    return [Choice("host_suffix", node.suffix, f"Slurm's address of {node.name} is {node.address}")]


def unread(facts: SiteFacts) -> set[str]:
    """The keys that rest on a part that could not be read. That there is no accounting is known."""
    parts = (part for part, reason in facts.unread.items() if reason != NO_ACCOUNTING)
    return {key for part in parts for key in RESTS_ON.get(part, ())}


def names_gpu(constraint: str) -> bool:
    """Whether the features of --constraint name a GPU."""
    return any(GPU_FEATURE.fullmatch(word) for word in re.split(r"[^\w.-]+", constraint))


def _gpus(facts: SiteFacts, partition: Partition | None, kinds: list[NodeKind]) -> list[Choice]:
    """How to ask for GPUs, and the share of CPUs that comes with one."""
    where = partition.name if partition else "it"
    have = [kind for kind in kinds if kind.gpus]
    if not have:
        return _without_gpus(facts, where, kinds)
    rows = _gpu_option(facts, f"{where} has {_types(have)}")
    mixed = len({row.type for kind in have for row in kind.gpus}) > 1
    if mixed and (name := _most_common_type(have)):
        reason = "guess: the type with most GPUs; a job without a type may get any"
        rows.append(Choice("gpu_type", name, reason))
        have = [kind for kind in have if any(row.type == name for row in kind.gpus)]
    return rows + _cpus(facts, partition, have)


def _without_gpus(facts: SiteFacts, where: str, kinds: list[NodeKind]) -> list[Choice]:
    """How to ask for GPUs where the partition for training has none: as in the others, if they have
    some. Nodes that are down count too."""
    feature = next(filter(None, map(gpu_feature, kinds)), "")
    text = f"partition {where} has no {'generic resource for GPUs' if feature else 'GPUs'}"
    others = dict.fromkeys(kind.partition for kind in facts.kinds if kind.gpus)
    rows = [Choice("gpu_option", "none", text)]
    if others:
        rows = _gpu_option(facts, f"{text}; these have: {', '.join(others)}")
    if feature:
        reason = "guess: the feature that names the GPU"
        rows.append(Choice("slurm.constraint", feature, reason))
    return rows


def _gpu_option(facts: SiteFacts, text: str) -> list[Choice]:
    """The option that requests GPUs; none where it is unknown which ones Slurm has."""
    plugin = facts.config.get("SelectType", "")
    if plugin.endswith("cons_tres"):
        return [Choice("gpu_option", "gpus-per-node", text)]
    gres = Choice("gpu_option", "gres", f"{text}; {plugin} has no --gpus-per-node")
    return [gres] if plugin else []


def usual_size(facts: SiteFacts) -> tuple[int, int]:
    """Nodes of a first job in the partition for training, two where it can have them, and GPUs of
    each; 0 GPUs where all nodes of the partition are known to have none."""
    partition, _ = best_partition(facts)
    kinds = facts.kinds_of(partition.name) if partition else []
    kinds = [kind for kind in kinds if kind.usable] or kinds
    have = [kind for kind in kinds if kind.gpus or gpu_feature(kind)]
    name = _most_common_type(have)
    have = [kind for kind in have if not name or node_choice.count(kind, name)]
    sizes = Counter[int]()
    for kind in have:
        sizes[max(1, node_choice.count(kind, name))] += kind.nodes
    gpus = sizes.most_common(1)[0][0] if have else int(not kinds)
    nodes = min(2, max(1, sum(kind.usable for kind in have or kinds)))
    return _within_limits(facts, partition, nodes, gpus, name) if partition else (nodes, gpus)


def _within_limits(
    facts: SiteFacts, partition: Partition, nodes: int, gpus: int, kind: str
) -> tuple[int, int]:
    """Nodes and GPUs of each within the limits of the partition, and of the account and QOS."""
    own = {row.key.removeprefix("slurm."): row.value for row in _account(facts, partition)}
    job = JobSpec(slurm={"partition": partition.name, **own})
    wanted = Wanted(job, {}, NodeRange(1, 1), gpus, kind, 0)
    limits = account_limits.most(wanted, partition, facts)
    of_node = account_limits.most(wanted, partition, facts, per_node=True)
    total = min((most for name, most in limits.items() if "gpu" in name), default=nodes * gpus)
    if gpus:
        gpus = max(1, min(gpus, total, *(n for name, n in of_node.items() if "gpu" in name)))
        nodes = min(nodes, total // gpus)
    caps = filter(None, (partition.max_nodes, limits.get("node")))
    return max(1, min([nodes, *caps]), partition.min_nodes), gpus


def _types(kinds: list[NodeKind]) -> str:
    """The GPUs of nodes in words: 4 a100 on 12 nodes, 8 h100 on 2 nodes."""
    nodes: dict[str, int] = {}
    for kind in kinds:
        gpus = " + ".join(_gpu_text(row) for row in kind.gpus)
        nodes[gpus] = nodes.get(gpus, 0) + kind.nodes
    return ", ".join(f"{gpus} on {counted(count, 'node')}" for gpus, count in nodes.items())


def _gpu_text(row: Gpus) -> str:
    return f"{row.count} {row.type}" if row.type else counted(row.count, "GPU")


def _most_common_type(kinds: list[NodeKind]) -> str:
    totals: dict[str, int] = {}
    for kind in kinds:
        for row in kind.gpus:
            if not row.sliced:
                totals[row.type] = totals.get(row.type, 0) + row.count * kind.nodes
    return max(totals, key=lambda name: totals[name], default="")


def _cpus(facts: SiteFacts, partition: Partition | None, kinds: list[NodeKind]) -> list[Choice]:
    """CPUs of one GPU, from the node with the smallest share."""
    shares = []
    for kind in kinds:
        sample = facts.sample(kind)
        cpus = min(filter(None, (kind.cpus, sample.cpus if sample else 0)), default=0)
        if partition and partition.max_cpus_per_node:
            cpus = min(cpus, partition.max_cpus_per_node)
        shares.append((cpus // kind.gpu_count, cpus, kind.gpu_count))
    share, cpus, gpus = min(shares, default=(0, 0, 0))
    if not share:
        return []
    return [Choice("cpus_per_gpu", share,
                   f"{cpus} CPUs for jobs, {counted(gpus, 'GPU')} on a node")]  # fmt: skip


def _account(facts: SiteFacts, partition: Partition | None) -> list[Choice]:
    """The account and QOS, where those of the user do not fit the partition."""
    may = accounts_for(facts, partition)
    if not may:
        return []
    rows = []
    if may[0] != facts.default_account:
        why = "you have no default account"
        if facts.default_account:
            usual = facts.default_account in may
            where = partition.name if partition else "this cluster"
            why = f"your default account {'is for CPUs' if usual else f'may not use {where}'}"
        others = [name for name in may[1:] if name != facts.default_account]
        why += f"; others: {', '.join(others)}" if others else ""
        rows.append(Choice("slurm.account", may[0], f"guess: {why}"))
    return rows + _qos(facts, partition, may[0])


def _qos(facts: SiteFacts, partition: Partition | None, account: str) -> list[Choice]:
    """The QOS, where the default one may not be used in the partition."""
    mine = [row for row in facts.associations if row.account == account]
    may = sorted({name for row in mine for name in row.qos})
    default = next((row.default_qos for row in mine if row.default_qos), "")
    if not partition or not (partition.qos or partition.denied_qos) or not may:
        return []
    fit = [n for n in may if n not in partition.denied_qos]
    fit = [n for n in fit if not partition.qos or n in partition.qos]
    if not fit or default in fit or (not default and "normal" in fit):
        return []
    fit.sort(key=lambda name: (name != partition.name, name not in USUAL, bool(TRIAL.search(name)),
                               bool(LOW.search(name)), name))  # fmt: skip
    reason = f"guess: the default QOS may not be used in {partition.name}"
    reason += f"; others: {', '.join(fit[1:])}" if fit[1:] else ""
    return [Choice("slurm.qos", fit[0], reason)]
