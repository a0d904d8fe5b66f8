"""The CPUs of one rank: as requested, or those that come with its GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpcddp import strategy
from hpcddp.planning.asked import Asked
from hpcddp.planning.site import node_choice
from hpcddp.sizes import parse_count
from hpcddp.slurm.node_kinds import NodeKind


def of(asked: Asked, kinds: Sequence[NodeKind], limit: int | None = None) -> int:
    """CPUs of one rank.

    Args:
        kinds: the kinds of nodes that the job can land on; empty if unknown.
        limit: most CPUs of a node that its partition gives a job; None for no limit.
    """
    job, profile, gpus = asked.spec, asked.profile, asked.gpus
    ranks = strategy.processes(job.strategy, gpus)
    if asked.backend == "local":
        return max(1, len(os.sched_getaffinity(0)) // (asked.nodes.max * ranks))
    if (count := job.slurm.get("cpus-per-task")) is not None:
        where = asked.sources["slurm.cpus-per-task"]
        return parse_count(count, "CPUs per task", where=where)
    even = node_choice.cpus_per_gpu(kinds, gpus)
    share = profile.cluster.cpus_per_gpu or even
    if kinds:  # a profile's share may be that of other nodes
        share = min(share, min(kind.cpus for kind in kinds) // gpus)
    if limit is not None:
        share = min(share, limit // gpus)
    return gpus // ranks * max(1, share)
