"""Limits of this process's cgroups, of version 2 or 1."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def read(
    controller: str,
    v2: Callable[[Path], float],
    v1: Callable[[Path], float],
    proc: Path = PROC,
    cgroups: Path = CGROUPS,
) -> Iterator[tuple[Path, float]]:
    """A value in each group of this process that has it.

    Args:
        controller: cpu, memory, ...
        v2: reads the value from a group's folder; v1: the same for version 1.
    """
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                for folder in _folders(cgroups, controllers, path):
                    with contextlib.suppress(OSError, ValueError):
                        yield folder, (v1 if controllers else v2)(folder)


def oom_kills(proc: Path = PROC, root: Path = CGROUPS) -> int:
    """Processes of this process's group that the kernel has ended for want of memory.

    Sources: kernel documentation, cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst
    (memory.oom_control).
    """

    def kills(name: str) -> Callable[[Path], float]:
        def read_one(folder: Path) -> float:
            rows = (line.split() for line in (folder / name).read_text().splitlines())
            return float(dict(rows)["oom_kill"])

        return read_one

    counts = read("memory", kills("memory.events"), kills("memory.oom_control"), proc, root)
    with contextlib.suppress(KeyError):
        return int(next((count for _, count in counts), 0))
    return 0


def _folders(cgroups: Path, controllers: str, path: str) -> Iterator[Path]:
    """The folders of a process's group and its parents, wherever the hierarchy is mounted. In a
    container its own group is the root, whatever its path outside."""
    names = [controllers, *controllers.split(",")] if controllers else ["", "unified"]
    inner = Path(path.lstrip("/"))
    for root in dict.fromkeys(cgroups / name for name in names):
        yield from (root / part for part in (inner, *inner.parents))


def memory_left(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Bytes of memory that this process's groups still allow; infinite without a limit.

    Sources: kernel documentation, cgroup-v2.rst (memory.max) and memory.rst of version 1.
    """
    left = read("memory", _left("max", "current", ""),
                _left("limit_in_bytes", "usage_in_bytes", "total_"), proc, cgroups)  # fmt: skip
    return min((figure for _, figure in left), default=float("inf"))


def _left(most: str, used: str, prefix: str) -> Callable[[Path], float]:
    """A reader. Cached pages of files count as free: the kernel drops them when needed."""

    def read(folder: Path) -> float:
        limit = float((folder / f"memory.{most}").read_text().replace("max", "inf"))
        held = int((folder / f"memory.{used}").read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - held + int(facts[f"{prefix}inactive_file"])

    return read
