"""Step 8: the ranks meet, show who they are (handshake.py), and become a process group."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, distributed_c10d

from hpcddp.attempt.error_record import host
from hpcddp.errors import RankMapError
from hpcddp.topology import Rank, check_map
from hpcddp.train.rank import descriptors, devices, handshake

T = TypeVar("T")

# Longer than any silence that a watchdog allows or a suspension takes, and the longest that poll(2)
# and torch's monitor of NCCL can count, in milliseconds of 32 bits.
NO_TIMEOUT = timedelta(days=24)


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

    def connect(self, *, watched: bool = False) -> None:
        """Start the process group, unless the program has, and make the groups beside it, which
        connect all ranks with each other: at the start, where a limit shows. A collective.

        Args:
            watched: a watchdog ends a rank that hangs, so no time-out of torch's is to do it.
        """
        if watched:
            _leave_to_watchdog(self.store)
        if not dist.is_initialized():
            _start(self)
        _ = self.control, self.saving

    def _group(self, name: str) -> dist.ProcessGroup | None:
        """Made once, by all ranks together."""
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
    """Meet the other ranks and check the map. ``World.connect`` starts the process group.

    Args:
        nodes: fewest and most nodes that the plan allows.
        local: all ranks are on this machine, whatever nodes they belong to.
        address: host and port of rank 0's store; not needed for a world of one.
        timeout: seconds to wait for the other ranks.

    Raises:
        RankMapError: a rank is wrong, doubled or missing, has lost its GPU or shares it.
        TopologyError: this process may not open as many connections as there are ranks.
    """
    count = devices.seen()
    descriptors.provide(rank, groups=2 if count else 3)  # the gradients' own one is NCCL's
    store = handshake.open_store(rank, address, timeout)
    try:
        check_map(rank, nodes, gpus_per_node)
        device = devices.pick(rank, count, os.environ, local=local)
        own = handshake.report(rank, devices.report(rank, device, count, os.environ))
        reports = handshake.meet(store, rank, own, timeout)
    except RankMapError as error:
        handshake.refuse(store, error)
        raise
    return World(rank, device, "nccl" if device.type == "cuda" else "gloo", reports, store)


def _start(world: World) -> None:
    """Start the process group of the ranks that have met."""
    gpu = world.device if world.device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        world.backend,
        store=world.store,
        rank=world.rank.world_rank,
        world_size=world.size,
        device_id=gpu,
    )


def _leave_to_watchdog(store: Store) -> None:
    """Let no time-out of torch's end what our watchdog lets live: a long start or save, a job that
    is suspended. They are 10 minutes for NCCL and 30 for gloo, and count the time suspended.

    These are torch's defaults for all groups of the process, those of a device mesh and of a task's
    own too: a mesh takes no time-out (torch 2.6).
    """
    distributed_c10d.default_pg_timeout = NO_TIMEOUT
    distributed_c10d.default_pg_nccl_timeout = NO_TIMEOUT
    store.set_timeout(NO_TIMEOUT)  # NCCL's communicators wait there for each other
    # torch's monitor aborts a process whose NCCL thread has stood still for 8 minutes, such as one
    # that waits for Python's lock or a driver that compiles. A person's own value stays.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{NO_TIMEOUT.total_seconds():.0f}")


def adopt(device: torch.device) -> World:
    """The world of a program that has its process group already.

    Raises:
        RankMapError: its ranks are not those of the environment, or one has lost its GPU.
        TopologyError: this process may not open as many connections as there are ranks.
    """
    size = dist.get_world_size()
    if "HPCDDP_RUN_DIR" in os.environ:
        rank = Rank.from_env(os.environ)
    else:  # its launcher may have set no environment
        rank = Rank(dist.get_rank(), size, dist.get_rank(), size, 0)
    if (dist.get_rank(), size) != (rank.world_rank, rank.world_size):
        raise RankMapError(
            f"the process group says rank {dist.get_rank()}({size}), the environment {rank}",
            where=f"rank {rank.world_rank} on {host()}",
            hint="take rank and world size from RANK and WORLD_SIZE",
        )
    backend = dist.get_backend()
    descriptors.provide(rank, groups=3 if backend == "gloo" else 2)
    world = World(rank, device, backend, [{}] * rank.world_size, HashStore())
    shown = devices.report(rank, device, devices.seen(), os.environ)
    # Over gloo: NCCL would open on the current device, which a script need not have set.
    dist.all_gather_object(world.reports, handshake.report(rank, shown), group=world.control)
    devices.check_lost(world.reports)
    if "HPCDDP_RUN_DIR" in os.environ:  # else nothing is saved
        world.connect()
    return world
