"""The CPUs that a rank really has, and how it divides them between computing and reading.

Slurm, taskset or a cpuset limit the CPUs of a process; a cgroup's quota limits its CPU time. Ranks
without a binding share the CPUs of their node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpcddp import cgroups

MOST_BESIDE_GPU, MOST = 8, 4  # most reading processes of one rank


class Division(NamedTuple):
    """The use of a rank's CPUs: ``workers`` processes with one thread each read, and the training
    computes with ``threads``."""

    cpus: int
    workers: int
    threads: int


def divide(cpus: int, device: str, asked: int = -1) -> Division:
    """Divide CPUs between reading and computing.

    With a GPU, most CPUs read. If the model computes on the CPU, a quarter reads. A rank with one
    CPU reads in its own process.

    Args:
        device: cuda or cpu.
        asked: requested reading processes; -1 to choose.
    """
    workers = asked
    if asked < 0:
        workers = min(cpus - 1, MOST_BESIDE_GPU) if device == "cuda" else min(cpus // 4, MOST)
    return Division(cpus, workers, max(1, cpus - workers))


def limit_threads(most: int) -> int:
    """Limit torch's threads; the resulting number. A lower setting of the user stays, such as
    OMP_NUM_THREADS."""
    threads = min(torch.get_num_threads(), most)
    if threads < torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads


def share(reports: Sequence[Mapping[str, Any]], rank: int) -> int:
    """CPUs of a rank of this machine, at least 1.

    Args:
        reports: the reports of all ranks at the start (world.py); may be empty.
        rank: this rank's global rank.
    """
    report = reports[rank] if reports else {}
    neighbours = [r for r in reports if r.get("host") == report.get("host")] or [report]

    def alike(name: str) -> int:
        return sum(r.get(name) == report.get(name) for r in neighbours)

    count = len(os.sched_getaffinity(0)) / alike("cpus")
    if limit := report.get("quota"):
        count = min(count, limit[1] / alike("quota"))
    return max(1, int(count))


def quota(proc: Path = cgroups.PROC, root: Path = cgroups.CGROUPS) -> list[Any] | None:
    """The cgroup with the tightest limit, and that limit in CPUs; None without a limit.

    Sources: kernel documentation, cgroup-v2.rst (cpu.max) and sched-bwc.rst (cfs_quota_us).
    """
    counts = cgroups.read("cpu", _max, _cfs, proc, root)
    limits = [(count, str(folder)) for folder, count in counts if count > 0]
    least = min(limits, key=lambda limit: limit[0], default=None)
    return least and [least[1], least[0]]


def _max(folder: Path) -> float:
    """CPUs by cpu.max of cgroup v2 (microseconds in a period, or "max"); 0 for no limit."""
    most, period = (folder / "cpu.max").read_text().split()
    return 0.0 if most == "max" else int(most) / int(period)


def _cfs(folder: Path) -> float:
    """The same for cgroup v1, where -1 is no limit."""
    most = int((folder / "cpu.cfs_quota_us").read_text())
    return most / int((folder / "cpu.cfs_period_us").read_text())
