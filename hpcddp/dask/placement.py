"""Where Dask's workers are: their ranks, and the devices of each."""

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
    """What a worker tells of itself."""

    host: str
    job: str  # its Slurm job, "" without one: workers of one job see the same devices
    name: str
    number: int  # its rank where a launcher gave it one; 0 elsewhere
    visible: list[str]  # devices, as CUDA_VISIBLE_DEVICES has them
    pid: int
    port: int  # that can be bound there


def look(dask_worker: Any) -> WorkerInfo:
    """Runs on a worker; Dask gives it the worker."""
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


def ranks(places: Mapping[str, WorkerInfo]) -> dict[str, Rank]:
    """Each worker's rank, in their order, by its address: as their launcher numbered them, else
    host by host. A worker in a batch script is 0 for Slurm, like all the others."""
    numbered = sorted(place.number for place in places.values()) == list(range(len(places)))

    def order(address: str) -> tuple[Any, ...]:
        place = places[address]
        if numbered:
            return (place.number,)
        number = int(place.name) if place.name.isdecimal() else len(places)
        return place.host, number, place.name, address

    sizes = Counter(place.host for place in places.values())
    nodes: dict[str, int] = {}
    seen: Counter[str] = Counter()
    found = {}
    for number, address in enumerate(sorted(places, key=order)):
        where = places[address].host
        node = nodes.setdefault(where, len(nodes))
        found[address] = Rank(number, len(places), seen[where], sizes[where], node)
        seen[where] += 1
    return found


def devices(places: Sequence[WorkerInfo]) -> list[list[str]]:
    """Each rank's devices, its own first; `places` are in the order of ranks.

    Workers of a host that see the same ones begin at one each. Those that see different ones were
    given their own already, by Slurm or by dask-cuda.
    """
    shared: dict[tuple[str, str], list[list[str]]] = {}
    found = []
    for place in places:
        shared.setdefault((place.host, place.job), []).append(place.visible)
    turn: Counter[tuple[str, str]] = Counter()
    for place in places:
        key = place.host, place.job
        same = all(other == place.visible for other in shared[key])
        i = turn[key] % len(place.visible) if same and place.visible else 0
        found.append(place.visible[i:] + place.visible[:i])
        turn[key] += 1
    return found


def has_gpus(places: Sequence[WorkerInfo]) -> bool:
    """Whether each rank can have a GPU of its own."""
    here = Counter((place.host, place.job) for place in places)
    return all(
        len({name for other in places if (other.host, other.job) == key for name in other.visible})
        >= count
        for key, count in here.items()
    )
