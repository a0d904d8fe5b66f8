"""The memory that a job asks for on each node: its GPUs' share of a node."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hpcddp.planning.site.cluster_now import ClusterNow
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.planning.site.wanted import Wanted
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.slurm.partitions import Partition

OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
VARIABLES = ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU")
LEAST = 1024  # MB; a node has 1 MB at Slurm if its memory is not configured


def share(
    wanted: Wanted,
    now: ClusterNow,
    kinds: Sequence[NodeKind],
    facts: SiteFacts | None,
    environ: Mapping[str, str],
) -> int:
    """Memory in MB to ask for on each node; 0 to ask for none.

    It is asked for where Slurm counts memory, and a job that asks for none gets a number of MB for
    each of its CPUs, less than the share, or all memory of a node of which it uses a part.

    Args:
        kinds: the kinds of nodes that the job can land on.
        facts: recorded facts, which know the memory that a node keeps for itself.
        environ: the user's, whose variables for sbatch may ask for memory.
    """
    gpus, cpus = wanted.gpus, wanted.cpus
    asked = any(option in wanted.job.slurm for option in OPTIONS)
    if not (gpus and now.counts_memory) or asked or any(name in environ for name in VARIABLES):
        return 0
    partitions = now.wanted(wanted.job)
    parts = [_part(kind, gpus, facts) for kind in kinds if kind.memory_mb and kind.gpu_count]
    memory = min([*parts, *(_limit(row, cpus) for row in partitions)], default=0)
    if not parts or memory < LEAST:
        return 0
    defaults = [row.default_memory if row.default_memory[0] else now.default_memory
                for row in partitions] or [now.default_memory]  # fmt: skip
    whole = all(gpus >= kind.gpu_count for kind in kinds)
    return memory if all(_too_far(of, mb, cpus, memory, whole) for of, mb in defaults) else 0


def _part(kind: NodeKind, gpus: int, facts: SiteFacts | None) -> int:
    """The share of some GPUs in a node's memory."""
    sample = facts.sample(kind) if facts else None
    memory = min(filter(None, (kind.memory_mb, sample.memory_mb if sample else 0)))
    return memory * gpus // max(gpus, kind.gpu_count)


def _limit(partition: Partition, cpus: int) -> int:
    """The most MB of memory that a job with these CPUs may have on a node."""
    of, most = partition.max_memory
    return {"node": most, "cpu": most * cpus}.get(of, sys.maxsize)


def _too_far(of: str, default: int, cpus: int, memory: int, whole: bool) -> bool:
    """Whether a partition's default is far from the share.

    Args:
        of: what the default is for: cpu, gpu or node; "" if there is none: then it is the node.
        whole: the share is all of a node.
    """
    return default * cpus < memory if of == "cpu" else not of and not whole
