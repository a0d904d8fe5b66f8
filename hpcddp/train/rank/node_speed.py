"""The full preflight, in the ranks once they have met: how fast each node computes and the network
sums.

All ranks measure at the same time, for half a second. If a rank is slow, its node and the fastest
others measure again, in turn. A node that is slow again ends the attempt, and the next one avoids
it; if it cannot, the training goes on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hpcddp import record as records
from hpcddp.attempt import error_record
from hpcddp.attempt.nodes import bad_nodes
from hpcddp.errors import HpcddpError, NodeUnfit
from hpcddp.rundir import RunDir
from hpcddp.slurm.hostlist_writer import compress_hosts
from hpcddp.train.rank import rates
from hpcddp.train.rank.world import World

ONCE = 0.5  # seconds of the first measurement
AGAIN = 1.5  # seconds of the second one, at most
SUMMED = 16 * 2**20  # bytes of the all-reduce
REPEATS = 3
LONG = 0.3  # seconds; a first all-reduce that takes as long is not repeated


def check(
    world: World, run: RunDir, attempt: int, preflight: str, record: Callable[..., object]
) -> None:
    """Measure, and record the figures; a collective, only for ``full`` on several nodes.

    Raises:
        NodeUnfit: on all ranks, if a node is slow in both measurements, and the next attempt can
            avoid it.
    """
    if preflight != "full" or world.size == 1:
        return
    hosts = world.gather(error_record.host())
    if len(set(hosts)) < 2:
        return
    work = rates.work(world.device)
    world.barrier()
    begin = time.monotonic()
    operations, seconds = work(ONCE)
    once = world.gather(operations / seconds)
    named = _again(world, work, once, hosts) if rates.candidates(once) else {}
    summed = _summed(world)
    record("preflight", slowest=min(once), median=statistics.median(once),
           all_reduce_s=summed, slow=named, seconds=time.monotonic() - begin)  # fmt: skip
    faults = {host: [f"computes at {part:.0%} of the speed of the others"]
              for host, part in named.items()}  # fmt: skip
    if faults and not world.gather(world.is_main and _are_kept(run, attempt, faults))[0]:
        text = "; ".join(f"{host} {texts[0]}" for host, texts in faults.items())
        error = NodeUnfit(f"{text}, in two measurements", compress_hosts(sorted(faults)))
        error.facts |= {"rank": hosts.index(min(named, key=named.__getitem__)), "faults": faults}
        raise error


def _are_kept(run: RunDir, attempt: int, faults: dict[str, list[str]]) -> bool:
    """Whether the attempt continues on slow nodes, as the next one could not avoid them."""
    try:
        return bad_nodes.are_kept(run, attempt, faults, records.read(run))
    except HpcddpError:  # rank 0 cannot read the run folder: the batch script decides
        return False


def _again(
    world: World, work: Callable[[float], tuple[int, float]], once: Sequence[float],
    hosts: Sequence[str],
) -> dict[str, float]:  # fmt: skip
    """The nodes that are slow again -> their part of the usual rate."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    nodes, slow = [numbers[host] for host in hosts], rates.candidates(once)
    well = rates.references(once, nodes, slow)
    turns = well | {nodes[rank] for rank in slow}
    own = rates.measure(work, turns, nodes[world.rank.world_rank], world.barrier,
                        rates.ROUNDS[1], AGAIN)  # fmt: skip
    named = rates.confirmed(world.gather(own), nodes, slow, well)
    return {hosts[rank]: part for rank, part in sorted(named.items(), key=lambda row: -row[1])}


def _summed(world: World) -> float:
    """The median time of an all-reduce, in seconds."""
    tensor = torch.ones(SUMMED // 4, device=world.device)
    first = max(world.gather(_all_reduce(tensor)))  # it makes connections
    if first > LONG:
        return first
    return statistics.median(_all_reduce(tensor) for _ in range(REPEATS))


def _all_reduce(tensor: torch.Tensor) -> float:
    """The seconds of one all-reduce."""
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
