"""Step 8: the rendezvous of the ranks (handshake.py), and their process group."""

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
from hpcddp.train.rank import descriptors, devices, handshake, without_numpy

T = TypeVar("T")

# Longer than any limit of the watchdog and any suspension, and near the maximum of poll(2) and of
# torch's NCCL monitor, which count milliseconds in 32 bits.
NO_TIMEOUT = timedelta(days=24)


@dataclass
class World:
    """The ranks of this attempt, as one rank sees them."""

    rank: Rank  #: global rank, local rank and node (hpcddp.topology.Rank)
    device: torch.device  #: device of this rank
    backend: str
    reports: list[dict[str, Any]]
    store: Store
    _groups: dict[str, dist.ProcessGroup | None] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """World size: number of ranks."""
        return self.rank.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0."""
        return self.rank.world_rank == 0

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [str(report.get("host", "")) for report in self.reports] or [""] * self.size

    @property
    def control(self) -> dist.ProcessGroup | None:
        """A gloo group for votes, restores and barriers, separate from that of the gradients."""
        return self._group("control")

    @property
    def saving(self) -> dist.ProcessGroup | None:
        """A gloo group for the saving threads only."""
        return self._group("saving")

    def without(self, group: dist.ProcessGroup | None) -> World:
        """Some ranks as a world of its own: the others are lost, and no group of theirs works.

        Args:
            group: a gloo group; None for this rank alone.
        """
        index, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        rank = Rank(index, size, index, size, 0)
        groups = {"control": group, "saving": group}
        return World(rank, self.device, self.backend, [{}] * size, HashStore(), groups)

    def connect(self, *, watched: bool = False) -> None:
        """Start the process group, unless the program has, and the gloo groups beside it. They
        connect all ranks at once, so a limit shows at the start. A collective.

        Args:
            watched: a watchdog ends a hanging rank, so torch's time-outs are lifted.
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
        """The values of all ranks, by rank; a collective of ``control`` or another gloo group."""
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=group or self.control)
        return everyone

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)


def leave() -> None:
    """End the process group. Delete DDP wrappers before: their destructor needs it."""
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
    """Join the other ranks and check the rank map. ``World.connect`` starts the process group.

    Args:
        nodes: least and greatest number of nodes that the plan allows.
        local: all ranks are on this machine, whatever their node numbers.
        address: host and port of rank 0's store; not needed for one rank.
        timeout: seconds to wait for the other ranks.

    Raises:
        RankMapError: a rank is wrong, duplicated or missing, has lost its GPU or shares it.
        TopologyError: the limit on file descriptors is too low for the number of ranks.
    """
    count = devices.seen()
    descriptors.provide(rank, groups=2 if count else 3)  # the gradients' group is NCCL's
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
    """Start the process group after the rendezvous."""
    gpu = world.device if world.device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    without_numpy.provide()
    dist.init_process_group(
        world.backend,
        store=world.store,
        rank=world.rank.world_rank,
        world_size=world.size,
        device_id=gpu,
    )


def _leave_to_watchdog(store: Store) -> None:
    """Lift torch's time-outs, so that only hpcddp's watchdog ends a rank. They are 10 minutes for
    NCCL and 30 for gloo, would end a long start or save, and count the time of a suspension.

    This changes torch's defaults for all groups of the process, also those of device meshes and of
    the task: a mesh has no parameter for it (torch 2.6).
    """
    distributed_c10d.default_pg_timeout = NO_TIMEOUT
    distributed_c10d.default_pg_nccl_timeout = NO_TIMEOUT
    store.set_timeout(NO_TIMEOUT)  # NCCL's communicators use it to find each other
    # torch's monitor aborts a process whose NCCL thread made no progress for 8 minutes, as while it
    # waits for Python's lock or a compiling driver. A value set by the user stays.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{NO_TIMEOUT.total_seconds():.0f}")


def adopt(device: torch.device) -> World:
    """The world of a program that has started its process group.

    Raises:
        RankMapError: its ranks differ from those of the environment, or one has lost its GPU.
        TopologyError: the limit on file descriptors is too low for the number of ranks.
    """
    size = dist.get_world_size()
    if "HPCDDP_RUN_DIR" in os.environ:
        rank = Rank.from_env(os.environ)
    else:  # the launcher may not have set an environment
        rank = Rank(dist.get_rank(), size, dist.get_rank(), size, 0)
    if (dist.get_rank(), size) != (rank.world_rank, rank.world_size):
        raise RankMapError(
            f"the process group has rank {dist.get_rank()}({size}), the environment {rank}",
            where=f"rank {rank.world_rank} on {host()}",
            hint="start the process group with the values of RANK and WORLD_SIZE",
        )
    backend = dist.get_backend()
    descriptors.provide(rank, groups=3 if backend == "gloo" else 2)
    world = World(rank, device, backend, [{}] * rank.world_size, HashStore())
    shown = devices.report(rank, device, devices.seen(), os.environ)
    # Over gloo: NCCL would use the current device, which the script may not have set.
    dist.all_gather_object(world.reports, handshake.report(rank, shown), group=world.control)
    devices.check_lost(world.reports)
    if "HPCDDP_RUN_DIR" in os.environ:  # without a run, nothing is saved
        world.connect()
    return world
