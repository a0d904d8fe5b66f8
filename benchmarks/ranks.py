"""The map of 10,000 nodes x 8 GPUs and its host list, in this process.

The host list is expanded to names, all rows of the map are read, and the names are compressed
again. The floor makes the same names and rows in plain comprehensions, without checks and without
compression; the limit is in seconds. The second row is the peak of memory by tracemalloc, beside
the same with 1 GPU per node. Eight times as many ranks must not need more memory, so no Python
object is kept for a rank.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator

from benchmarks.measure import Row
from benchmarks.site import Site
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.slurm.hostlist_writer import compress_hosts
from hpcddp.topology import Topology, map_rows

NODES, GPUS = 10_000, 8
LIMIT = 0.1  # seconds
MEMORY_LIMIT = 1.05


def rows(site: Site) -> Iterator[Row]:
    ours, floor = site.interleave("ranks", lambda: _seconds(_ours), lambda: _seconds(_floor))
    yield Row("ranks", ours, floor, limit=LIMIT)
    ours, floor = site.interleave("ranks memory", lambda: _peak(GPUS), lambda: _peak(1))
    yield Row("ranks memory", ours, floor, unit="B", ratio_limit=MEMORY_LIMIT)


def _ours(gpus: int = GPUS) -> None:
    hosts = expand_hosts(f"n[1-{NODES}]")
    deque(map_rows(Topology(NODES, gpus), hosts), maxlen=0)  # reads all rows and keeps none
    compress_hosts(hosts)


def _floor() -> None:
    hosts = [f"n{number}" for number in range(1, NODES + 1)]
    found = (
        (node * GPUS + local, node, host, local)
        for node, host in enumerate(hosts)
        for local in range(GPUS)
    )
    deque(found, maxlen=0)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _peak(gpus: int) -> float:
    """Peak of the allocated bytes, with this number of GPUs per node."""
    tracemalloc.start()
    try:
        _ours(gpus)
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
