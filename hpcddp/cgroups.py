"""What the cgroups around this process allow it. A node's kernel has version 2 of them, or 1."""

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
    """What a figure is in each group that this process is in and that tells it.

    Args:
        controller: cpu, memory, ...
        v2: reads the figure from a group's folder; v1: the same of version 1.
    """
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                for folder in _folders(cgroups, controllers, path):
                    with contextlib.suppress(OSError, ValueError):
                        yield folder, (v1 if controllers else v2)(folder)


def _folders(cgroups: Path, controllers: str, path: str) -> Iterator[Path]:
    """A process's group and those around it, where the hierarchy may be mounted. A container sees
    its own group as the root, whatever its path outside."""
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
    """A reader. Pages of files that are on a disk too count as free: they go where others come."""

    def read(folder: Path) -> float:
        limit = float((folder / f"memory.{most}").read_text().replace("max", "inf"))
        held = int((folder / f"memory.{used}").read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - held + int(facts[f"{prefix}inactive_file"])

    return read
