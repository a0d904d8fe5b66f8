"""Step 8: the ranks meet, show who they are, and become a process group.

They meet in one store, hosted by rank 0 and used by the process group as well. Each shows its
host, device and CPUs; the last one to come judges the map, and all train or none.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore

from hpcddp.errors import RankMapError
from hpcddp.failure import host
from hpcddp.ledger import process_start
from hpcddp.topology import Rank, check_map
from hpcddp.train.cpus import quota

T = TypeVar("T")


@dataclass
class World:
    """The ranks of this attempt, and this one's place among them."""

    rank: Rank
    device: torch.device
    backend: str
    reports: list[dict[str, Any]]
    store: Store
    _groups: dict[str, dist.ProcessGroup | None] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return self.rank.world_size

    @property
    def is_main(self) -> bool:
        return self.rank.world_rank == 0

    @property
    def hosts(self) -> list[str]:
        """Where each rank is."""
        return [str(report.get("host", "")) for report in self.reports] or [""] * self.size

    @property
    def control(self) -> dist.ProcessGroup | None:
        """A gloo group for votes, restores and barriers, beside the gradients' one."""
        return self._group("control")

    @property
    def saving(self) -> dist.ProcessGroup | None:
        """A gloo group for the threads that save; nothing else may use it."""
        return self._group("saving")

    def _group(self, name: str) -> dist.ProcessGroup | None:
        """Made when it is first needed, by all ranks together."""
        if name not in self._groups:
            self._groups[name] = dist.new_group(backend="gloo")
        return self._groups[name]

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Every rank's value, by rank; a collective of ``control`` or another gloo group."""
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=group or self.control)
        return everyone

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)


def leave() -> None:
    """End the process group. DDP wrappers must be gone: their destructor needs it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join(
    rank: Rank,
    nodes: tuple[int, int],
    gpus_per_node: int,
    *,
    local: bool,
    address: tuple[str, int] | None = None,
    timeout: float = 600.0,
) -> World:
    """Meet the other ranks, check the map, and start the process group.

    Args:
        nodes: fewest and most nodes that the plan allows.
        local: all ranks are on this machine, whatever nodes they belong to.
        address: host and port of rank 0's store; not needed for a world of one.
        timeout: seconds to wait for the other ranks.

    Raises:
        RankMapError: a rank is wrong, doubled or missing, or two share a GPU.
    """
    store = _store(rank, address, timeout)
    try:
        check_map(rank, nodes, gpus_per_node)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = pick_device(rank, count, local=local)
        reports = meet(store, rank, _report(rank, device), timeout)
    except RankMapError as error:
        refuse(store, error)
        raise
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank.world_rank,
        world_size=rank.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    return World(rank, device, backend, reports, store)


def adopt(device: torch.device) -> World:
    """The world of a program that has its process group already.

    Raises:
        RankMapError: its ranks are not those of the environment.
    """
    size = dist.get_world_size()
    if "HPCDDP_RUN_DIR" in os.environ:
        rank = Rank.from_env(os.environ)
    else:  # whoever started it may have told nobody
        rank = Rank(dist.get_rank(), size, dist.get_rank(), size, 0)
    if (dist.get_rank(), size) != (rank.world_rank, rank.world_size):
        raise RankMapError(
            f"the process group says rank {dist.get_rank()}({size}), the environment {rank}",
            where=f"rank {rank.world_rank} on {host()}",
            hint="take rank and world size from RANK and WORLD_SIZE",
        )
    world = World(rank, device, dist.get_backend(), [{}] * rank.world_size, HashStore())
    # Over gloo: NCCL would open on the current device, which a script need not have set.
    dist.all_gather_object(world.reports, _report(rank, device), group=world.control)
    return world


def _store(rank: Rank, address: tuple[str, int] | None, timeout: float) -> Store:
    """The store where ranks meet; rank 0 hosts it, or torch's agent that started it."""
    if rank.world_size == 1:
        return HashStore()
    where = f"rank {rank.world_rank} on {host()}"
    if address is None:
        raise RankMapError(
            "MASTER_ADDR or MASTER_PORT is not set",
            where=where,
            hint="start the ranks with the run's script",
        )
    name, port = address
    main = rank.world_rank == 0
    try:
        return TCPStore(
            name,
            port,
            is_master=main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    except dist.DistError as error:
        if main:
            what = f"cannot listen on port {port}: {_first_line(error)}"
            hint = "another process has the port, or two processes are rank 0"
        else:
            what = f"cannot reach rank 0 at {name}:{port} within {timeout:g} s"
            hint = "rank 0 did not start, or a firewall is between the nodes"
        raise RankMapError(what, where=where, hint=hint) from None


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def pick_device(rank: Rank, count: int, *, local: bool) -> torch.device:
    """This rank's device: its own GPU, or the CPU where there are none or, locally, too few.

    Args:
        count: GPUs that this process sees.
        local: all ranks are on this machine.
    """
    if count == 0 or (local and count < rank.world_size):
        return torch.device("cpu")
    if local:  # virtual nodes share the machine, so their ranks count on
        return torch.device("cuda", rank.world_rank)
    if count == 1:
        return torch.device("cuda", 0)
    if rank.local_rank < count:
        return torch.device("cuda", rank.local_rank)
    raise RankMapError(
        f"local rank {rank.local_rank} sees only {count} GPUs",
        where=f"rank {rank.world_rank} on {host()}",
        hint="ask Slurm for as many GPUs as ranks with --gpus-per-node",
    )


def _report(rank: Rank, device: torch.device) -> dict[str, Any]:
    """What a rank shows of itself."""
    uuid = ""
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {
        "rank": rank.world_rank,
        "node": rank.node,
        "local": rank.local_rank,
        "host": host(),
        "device": str(device),
        "uuid": uuid,
        "cpus": ranges(os.sched_getaffinity(0)),
        "quota": quota(),
        **_identity(),
    }


def _identity() -> dict[str, Any]:
    """What tells this process from any other: its id is one in its namespace and for its life."""
    space = ""
    with contextlib.suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return {"pid": os.getpid(), "start": process_start(os.getpid()), "space": space}


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: 0-3,8."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def meet(store: Store, rank: Rank, report: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Hand in this rank's report and wait for the verdict on all of them."""
    number, size = rank.world_rank, rank.world_size
    if store.add(f"hpcddp/claim/{number}", 1) > 1:
        raise RankMapError(
            f"two processes are rank {number}; the second is on {report['host']}, "
            f"process {report['pid']}",
            hint="each process needs a rank of its own: start them with the run's script",
        )
    store.set(f"hpcddp/rank/{number}", json.dumps(report))
    if store.add("hpcddp/arrived", 1) == size:
        texts = store.multi_get([f"hpcddp/rank/{n}" for n in range(size)])
        reports = [json.loads(text) for text in texts]
        _check_devices(reports)
        store.set("hpcddp/verdict", json.dumps({"ranks": reports}))
    try:
        store.wait(["hpcddp/verdict"], timedelta(seconds=timeout))
    except dist.DistStoreError:
        raise _missing(store, size, timeout) from None
    verdict = json.loads(store.get("hpcddp/verdict"))
    if "error" in verdict:
        raise RankMapError(**verdict["error"])
    found: list[dict[str, Any]] = verdict["ranks"]
    return found


def refuse(store: Store, error: RankMapError) -> None:
    """Tell the ranks that wait; the first to refuse is the one they hear."""
    text = json.dumps({"error": {"what": error.what, "where": error.where, "hint": error.hint}})
    store.compare_set("hpcddp/verdict", "", text)


def _missing(store: Store, size: int, timeout: float) -> RankMapError:
    absent = ranges(n for n in range(size) if not store.check([f"hpcddp/rank/{n}"]))
    return RankMapError(
        f"of {size} ranks, {absent} did not come within {timeout:g} s",
        hint="their logs say why; HPCDDP_START_TIMEOUT sets the seconds to wait",
    )


def _check_devices(reports: list[dict[str, Any]]) -> None:
    """Two ranks on one GPU halve its memory, and NCCL hangs or refuses much later."""
    seen: dict[str, int] = {}
    for report in reports:
        uuid = report["uuid"]
        if uuid and uuid in seen:
            raise RankMapError(
                f"ranks {seen[uuid]} and {report['rank']} share one GPU, {uuid}",
                where=f"rank {report['rank']} on {report['host']}",
                hint="ask Slurm for as many GPUs as ranks with --gpus-per-node",
            )
        seen[uuid] = report["rank"]
