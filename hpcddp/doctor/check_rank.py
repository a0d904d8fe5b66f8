"""`python -m hpcddp.doctor.check_rank`: one rank of the check-up's job.

Rank 0 writes what all ranks found into the run folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcddp import record
from hpcddp.attempt.nodes import machine
from hpcddp.doctor import links
from hpcddp.rundir import RunDir, write_json
from hpcddp.topology import Rank

if TYPE_CHECKING:
    import torch

RESULTS = "doctor.json"  # in the run folder
SCHEMA_VERSION = 1
START = timedelta(minutes=10)
VISIBLE = 20.0  # seconds until a file of another node must be visible
CLOCKS = 8  # readings


def results(run: RunDir) -> Path:
    """The file with the results of a check-up."""
    return run.path / RESULTS


def main(words: list[str]) -> None:
    """Check, and write the results.

    Args:
        words: hosts to reach, as host:port.
    """
    begin = time.perf_counter()
    import torch  # its time is a result

    imported = time.perf_counter() - begin
    import torch.distributed as dist

    rank, run = Rank.from_env(os.environ), RunDir(os.environ["HPCDDP_RUN_DIR"])
    device = _device(rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=START, device_id=device if backend == "nccl" else None)
    control = dist.new_group(backend="gloo", timeout=START) if backend == "nccl" else None
    ranks = _ControlGroup(rank, control)
    own: dict[str, Any] = {"rank": rank.world_rank, "node": rank.node, "import_seconds": imported,
                           "torch": torch.__version__, "device": str(device)}  # fmt: skip
    if rank.local_rank == 0:
        own |= _node(run, words)
    own["visible"] = _visible(run, ranks)
    own["clock"] = _clock(ranks)
    rows = ranks.all(own)
    measured = {"ranks": rows, **_speeds(device, ranks), **_network(device, ranks)}
    if rank.world_rank == 0:
        facts = {"schema_version": SCHEMA_VERSION, "backend": backend, "time": time.time(),
                 "device": record.read(run).spec.get("device", "auto")}  # fmt: skip
        write_json(results(run), {**facts, **measured})
    ranks.barrier()
    dist.destroy_process_group()


class _ControlGroup:
    """All ranks, through the group for control."""

    def __init__(self, rank: Rank, group: Any) -> None:
        self.rank, self.group = rank, group

    def all(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.rank.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks, without using the CPU meanwhile."""
        import torch.distributed as dist

        dist.barrier(group=self.group)


def _device(rank: Rank) -> torch.device:
    """The GPU of a rank, or the CPU where the job asked for none."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _node(run: RunDir, words: list[str]) -> dict[str, Any]:
    """What one rank of each node reads of it."""
    facts = machine.read(run.path)
    facts["writes"] = {}
    with contextlib.suppress(OSError):  # a node without the folder: the others have its results
        facts["writes"] = machine.write_times(run.path)
    facts["address"] = machine.route_to(os.environ.get("MASTER_ADDR", ""))
    facts["interface"] = machine.interface_of(facts["address"])
    facts["unreachable"] = {}
    for word in words:
        host, _, port = word.rpartition(":")
        if why := machine.reachable(host, int(port)):
            facts["unreachable"][word] = why
    return facts


def _visible(run: RunDir, ranks: _ControlGroup) -> float | None:
    """Seconds until a file that rank 0 wrote is visible here; None if it never was."""
    path = run.path / "doctor-visible"
    if ranks.rank.world_rank == 0:
        path.write_text("x")
    ranks.barrier()
    begin = time.monotonic()
    while not path.exists():
        if time.monotonic() - begin > VISIBLE:
            break
        time.sleep(0.05)
    spent = time.monotonic() - begin if path.exists() else None
    ranks.barrier()
    if ranks.rank.world_rank == 0:
        path.unlink()
    return spent


def _clock(ranks: _ControlGroup) -> float:
    """Seconds by which this clock is ahead of that of rank 0: the least difference of some
    readings, each right after a barrier."""
    differences: list[float] = []
    for _ in range(CLOCKS):
        ranks.barrier()
        now = ranks.all(time.time())
        differences.append(now[ranks.rank.world_rank] - now[0])
    return min(differences, key=abs)


def _speeds(device: torch.device, ranks: _ControlGroup) -> dict[str, Any]:
    """The rate of each rank in operations per second, and the slow ones."""
    from hpcddp.train.rank import rates

    run, rank = rates.work(device), ranks.rank
    nodes: list[int] = ranks.all(rank.node)
    once: list[float] = ranks.all(
        rates.measure(run, set(nodes), rank.node, ranks.barrier, rates.ROUNDS[0])
    )
    slow = rates.candidates(once)
    if not slow:
        return {"rates": once, "slow": {}}
    well = rates.references(once, nodes, slow)
    turns = well | {nodes[number] for number in slow}
    again = ranks.all(rates.measure(run, turns, rank.node, ranks.barrier, rates.ROUNDS[1]))
    named = rates.confirmed(again, nodes, slow, well)
    return {"rates": once, "slow": {str(number): part for number, part in named.items()}}


def _network(device: torch.device, ranks: _ControlGroup) -> dict[str, Any]:
    """All-reduce by size, and the bandwidth of each pair of nodes."""
    rank = ranks.rank
    if rank.world_size == 1:
        return {"all_reduce": [], "pairs": []}
    places: list[tuple[int, int]] = ranks.all((rank.node, rank.local_rank))
    leaders = [number for number, (_, local) in enumerate(places) if local == 0]
    reduced = links.all_reduce(device, rank.world_size)
    own = links.pairs(device, rank.node, rank.local_rank == 0, leaders, ranks.barrier)
    rows = ranks.all(own)
    pairs = [[places[number][0], other, speed]
             for number, row in enumerate(rows) for other, speed in row.items()]  # fmt: skip
    return {"all_reduce": reduced, "pairs": pairs}


if __name__ == "__main__":
    main(sys.argv[1:])
