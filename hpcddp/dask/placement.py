"""The rank of each Dask worker, and the devices of each rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp.attempt.error_record import host
from hpcddp.attempt.rendezvous import free_port
from hpcddp.errors import TopologyError
from hpcddp.topology import Rank


class WorkerInfo(NamedTuple):
    """Facts about a Dask worker."""

    host: str
    job: str  # its Slurm job or "": workers of one job see the same devices
    name: str
    number: int  # its rank if a launcher set one, else 0
    visible: list[str]  # devices, as in CUDA_VISIBLE_DEVICES
    pid: int
    port: int  # a free port on its host


def look(dask_worker: Any) -> WorkerInfo:
    """Collect the facts; runs on a worker, which Dask passes in ``dask_worker``."""
    try:
        number = Rank.from_env(os.environ).world_rank
    except TopologyError:
        number = 0
    job = os.environ.get("SLURM_JOB_ID", "")
    name = str(dask_worker.name)
    return WorkerInfo(host(), job, name, number, _visible(os.environ), os.getpid(), free_port())


def _visible(environ: Mapping[str, str]) -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def ranks(workers: Mapping[str, WorkerInfo]) -> dict[str, Rank]:
    """The rank of each worker by its address, in the order of ranks.

    Ranks follow the launcher's numbers if they are complete, else the hosts. Without srun each
    worker has the number 0: then the numbers are not complete.
    """
    numbered = sorted(worker.number for worker in workers.values()) == list(range(len(workers)))

    def order(address: str) -> tuple[Any, ...]:
        worker = workers[address]
        if numbered:
            return (worker.number,)
        number = int(worker.name) if worker.name.isdecimal() else len(workers)
        return worker.host, number, worker.name, address

    sizes = Counter(worker.host for worker in workers.values())
    nodes: dict[str, int] = {}
    local: Counter[str] = Counter()  # host -> number of its workers with a rank so far
    by_address = {}
    for number, address in enumerate(sorted(workers, key=order)):
        name = workers[address].host
        node = nodes.setdefault(name, len(nodes))
        by_address[address] = Rank(number, len(workers), local[name], sizes[name], node)
        local[name] += 1
    return by_address


def devices(workers: Sequence[WorkerInfo]) -> list[list[str]]:
    """The devices of each rank, its own first. `workers` are in the order of ranks.

    Workers of a host that see the same devices each start at another one. Workers that see
    different devices already have their own from Slurm or dask-cuda.
    """
    shared: dict[tuple[str, str], list[list[str]]] = {}
    rotated = []
    for worker in workers:
        shared.setdefault((worker.host, worker.job), []).append(worker.visible)
    turn: Counter[tuple[str, str]] = Counter()
    for worker in workers:
        key = worker.host, worker.job
        same = all(visible == worker.visible for visible in shared[key])
        i = turn[key] % len(worker.visible) if same and worker.visible else 0
        rotated.append(worker.visible[i:] + worker.visible[:i])
        turn[key] += 1
    return rotated


def has_gpus(workers: Sequence[WorkerInfo]) -> bool:
    """Whether each rank can have its own GPU."""
    sizes = Counter((worker.host, worker.job) for worker in workers)
    visible: dict[tuple[str, str], set[str]] = {}
    for worker in workers:
        visible.setdefault((worker.host, worker.job), set()).update(worker.visible)
    return all(len(visible[key]) >= count for key, count in sizes.items())
