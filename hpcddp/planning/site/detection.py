"""Read the facts of a cluster from Slurm alone, in at most eight calls, none of them for each node.

A part that cannot be read is named in `unread`, and the others are read all the same.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable
from typing import Any

from hpcddp.errors import HpcddpError, SlurmUnreachable
from hpcddp.planning.site.choices import NO_ACCOUNTING
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.slurm import (
    accounts,
    node_kinds,
    node_samples,
    other_clusters,
    partitions,
    reservations,
    rules,
)
from hpcddp.slurm.hostlist import first_host

# The settings of slurm.conf(5) that a plan or a person may need.
SETTINGS = (
    "AccountingStorageEnforce", "AccountingStorageTRES", "AccountingStorageType", "AuthInfo",
    "ClusterName", "DefMemPerCPU", "DefMemPerNode", "EnforcePartLimits", "GresTypes",
    "JobDefaults", "JobRequeue", "JobSubmitPlugins", "KillWait", "MaxArraySize", "PreemptMode",
    "PreemptParameters", "PreemptType", "PriorityType", "PrologFlags", "ProctrackType",
    "SLURM_VERSION", "SelectType", "SelectTypeParameters", "SlurmctldParameters", "TaskPlugin",
    "TopologyPlugin",
)  # fmt: skip


def read(clusters: str = "") -> SiteFacts:
    """The facts of the cluster of this shell, or of another one.

    Args:
        clusters: the name of another one.

    Raises:
        SlurmUnreachable: Slurm is missing, or its controller does not answer.
    """
    with other_clusters.asked(clusters):
        return _read(clusters)


def _read(clusters: str) -> SiteFacts:
    config = rules.config()
    settings = {name: config[name] for name in SETTINGS if name in config}
    facts = SiteFacts(config.get("ClusterName", ""), config.get("SLURM_VERSION", ""), time.time(),
                      settings, clusters=clusters)  # fmt: skip
    for part, ask in PARTS.items():
        try:
            ask(facts)
        except HpcddpError as error:
            facts.unread[part] = error.what
    return facts


def _nodes(facts: SiteFacts) -> None:
    facts.kinds = node_kinds.read()


def _partitions(facts: SiteFacts) -> None:
    facts.partitions = partitions.read()


def _samples(facts: SiteFacts) -> None:
    hosts = {kind.shape: first_host(kind.hosts) for kind in facts.kinds if kind.hosts}
    facts.samples = node_samples.read(list(dict.fromkeys(hosts.values())))


def _accounts(facts: SiteFacts) -> None:
    if not accounting(facts):
        raise SlurmUnreachable(NO_ACCOUNTING)
    facts.associations = accounts.associations(getpass.getuser(), facts.cluster)
    facts.default_account = next((a.account for a in facts.associations if a.default), "")


def _qos(facts: SiteFacts) -> None:
    if not accounting(facts):
        raise SlurmUnreachable(NO_ACCOUNTING)
    facts.qos = accounts.qos()


def _reservations(facts: SiteFacts) -> None:
    facts.reservations = reservations.read()


def _budgets(facts: SiteFacts) -> None:
    if accounting(facts) and facts.config.get("PriorityType", "").endswith("multifactor"):
        facts.budgets = accounts.budgets()


def accounting(facts: SiteFacts) -> bool:
    """Whether the Slurm has accounting."""
    return facts.config.get("AccountingStorageType", "").endswith("slurmdbd")


PARTS: dict[str, Callable[[SiteFacts], Any]] = {
    "partitions": _partitions,
    "nodes": _nodes,
    "samples of nodes": _samples,
    "accounts": _accounts,
    "QOS": _qos,
    "reservations": _reservations,
    "budgets": _budgets,
}
