"""ResumableSampler beside torch's DistributedSampler, in this process and in new ones.

All indices of an epoch are read one by one, as a loader reads them, with the same arguments. With 8
replicas ours computes one eighth of the indices; torch always shuffles all of them. The sizes are
round, not round, just above a power of two, and large.

The first index of 1e9 samples is measured in a new process. The limits are in seconds from the
call, and in bytes of peak memory above the memory after the imports. DistributedSampler would need
gigabytes, so its figure is for a thousandth of the samples.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import DistributedSampler

from benchmarks.measure import Row
from benchmarks.site import PYTHON, Site, output
from hpcddp.train.input.sampler import ResumableSampler

LIMIT = 0.5
SIZES = {"1e6": 10**6, "1.1e6": 1_100_000, "2^20+1": 2**20 + 1, "1e7": 10**7}
REPLICAS = (1, 8)
HUGE, FLOOR = 10**9, 10**6
FIRST_LIMIT = 0.005  # seconds
MEMORY_LIMIT = 50e6  # bytes
SAMPLERS = {"ours": ResumableSampler, "torch": DistributedSampler}


def rows(site: Site) -> Iterator[Row]:
    for name, size in SIZES.items():
        for replicas in REPLICAS:
            label = f"sampler {name}/{replicas}"
            ours, floor = site.interleave(
                label,
                lambda s=size, r=replicas: _epoch("ours", s, r),  # type: ignore[misc]
                lambda s=size, r=replicas: _epoch("torch", s, r),  # type: ignore[misc]
            )
            yield Row(label, ours, floor, ratio_limit=LIMIT)
    for label, key, limit in (
        ("sampler first", "seconds", FIRST_LIMIT),
        ("sampler memory", "bytes", MEMORY_LIMIT),
    ):
        ours, floor = site.interleave(
            label,
            lambda k=key: _alone(site, "ours", HUGE, k),  # type: ignore[misc]
            lambda k=key: _alone(site, "torch", FLOOR, k),  # type: ignore[misc]
        )
        yield Row(label, ours, floor, unit="s" if key == "seconds" else "B", limit=limit)


def _epoch(kind: str, size: int, replicas: int) -> float:
    """Seconds to read all indices of one rank."""
    began = time.perf_counter()
    sampler = SAMPLERS[kind](range(size), replicas, 0, seed=1)
    sampler.set_epoch(2)
    deque(sampler, maxlen=0)
    return time.perf_counter() - began


def _alone(site: Site, kind: str, size: int, key: str) -> float:
    """A figure for the first index, in a new process."""
    command = [PYTHON, "-m", "benchmarks.sampler", kind, str(size)]
    return float(json.loads(output(command, site.environ, Path(__file__).parent.parent))[key])


def _first(kind: str, size: int) -> dict[str, float]:
    """Seconds to the first index, and peak memory in bytes above the memory before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
    idle = _memory("VmRSS")
    began = time.perf_counter()
    sampler = SAMPLERS[kind](range(size), 8, 3, seed=1)
    sampler.set_epoch(2)
    next(iter(sampler))
    return {"seconds": time.perf_counter() - began, "bytes": _memory("VmHWM") - idle}


def _memory(field: str) -> float:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    print(json.dumps(_first(sys.argv[1], int(sys.argv[2]))))
