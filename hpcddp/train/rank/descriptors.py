"""File descriptors of a rank: enough for connections to all other ranks, or a clear error.

In each group, gloo connects each rank with every other one, and rank 0 also hosts the store. The
usual soft limit of 1,024 is too low from about 300 ranks on; a rank that reaches it fails with "Too
many open files" on one host, while the others wait.
"""

from __future__ import annotations

import resource

from hpcddp.attempt.error_record import host
from hpcddp.errors import TopologyError
from hpcddp.topology import Rank

GROUP = 3  # of a gloo group, besides one per rank: its event loop (counted with torch 2.13)
STORE = 10  # of the store, besides one per rank
MARGIN = 128  # for files, data workers and NCCL
# Upper limit if fewer are needed: some programs close every possible descriptor.
PLENTY = 1 << 16


def needed(rank: Rank, groups: int) -> int:
    """Descriptors that a rank needs.

    Args:
        groups: number of gloo groups of all ranks.
    """
    hosts = rank.world_size + STORE if rank.world_rank == 0 else 0
    return groups * (rank.world_size + GROUP) + hosts + MARGIN


def provide(rank: Rank, groups: int) -> None:
    """Raise the soft limit of this process as far as needed.

    Raises:
        TopologyError: the hard limit is too low for the world.
    """
    need = needed(Rank(0, *rank[1:]), groups)  # rank 0 needs most: all ranks check the same
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < need:
        raise TopologyError(
            f"{rank.world_size} ranks need {need} file descriptors in this process, and the hard "
            f"limit is {hard}",
            where=f"rank {rank.world_rank} on {host()}",
            hint=f"raise LimitNOFILE of slurmd on the node, or run `ulimit -n {need}` before "
            "submitting (Slurm passes it on with PropagateResourceLimits)",
        )
    wanted = max(need, PLENTY) if hard == unlimited else min(max(need, PLENTY), hard)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
