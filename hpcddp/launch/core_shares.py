"""The CPUs of each rank of a node, if one process has the CPUs of all of them.

Slurm binds tasks, not the children of a task. So the parent of the ranks divides its CPUs as srun
divides those of a node: whole cores, so that no two ranks compute on the threads of one core, and
neighbouring ones (sysfs: kernel documentation, admin-guide/cputopology.rst).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def shares(cpus: Collection[int], count: int, root: Path = CPUS) -> list[set[int]]:
    """Divide CPUs among ranks; an empty list if there are fewer CPUs than ranks.

    Args:
        cpus: the numbers of the CPUs.
        count: the ranks. Each gets the same number of cores, or of their threads if there are
            fewer cores than ranks.
    """
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = _text(root / f"cpu{cpu}/topology/thread_siblings_list", cpu)
        cores.setdefault(siblings, []).append(cpu)
    parts = sorted(cores.values(), key=lambda core: _place(core[0], root))
    if len(parts) < count:
        parts = [[cpu] for part in parts for cpu in part]
    each = len(parts) // count
    return [set().union(*parts[i * each : (i + 1) * each]) for i in range(count) if each]


def _place(cpu: int, root: Path) -> tuple[int, int, int]:
    """The socket and the NUMA node of a CPU, and its own number."""
    folder = root / f"cpu{cpu}"
    socket = _text(folder / "topology/physical_package_id", 0)
    node = next((path.name[4:] for path in folder.glob("node[0-9]*")), "0")
    return int(socket), int(node), cpu


def _text(path: Path, default: int) -> str:
    """The content of a file of the kernel, or a default if this kernel has no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return str(default)
