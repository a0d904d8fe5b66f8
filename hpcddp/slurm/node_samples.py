"""What only `scontrol show node` says of a node: one node of each shape is asked, never all.

The names of the fields are those of scontrol(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import commands as slurm
from hpcddp.slurm.node_kinds import whole
from hpcddp.slurm.partitions import fields

MOST = 32  # nodes in one call: a cluster with more shapes than this has unknown ones


@dataclass
class NodeSample:
    """A node.

    Args:
        cpus: that jobs get: without those reserved for the system.
        cores: physical cores of the node; 0 where Slurm does not say.
        threads: of a core.
        memory_mb: that jobs get, in MB of 2**20 bytes.
        arch: such as x86_64 or aarch64; "" for a node that has not started yet.
        os: name and release of its kernel; "" likewise.
        address: its name or number on the network that Slurm uses.
    """

    name: str
    cpus: int
    cores: int
    threads: int
    memory_mb: int
    arch: str = ""
    os: str = ""
    address: str = ""

    @property
    def suffix(self) -> str:
        """What its address adds to its name, such as i or -ib0; "" for another form."""
        return self.address.removeprefix(self.name) if self.address.startswith(self.name) else ""


def read(names: Sequence[str], timeout: float = slurm.TIMEOUT) -> dict[str, NodeSample]:
    """The nodes of these names, as far as Slurm has them.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    if not names:
        return {}
    asked = ",".join(names[:MOST])
    done = slurm.call("scontrol", "--oneliner", "show", "node", asked, timeout=timeout)
    if done.returncode and not done.stdout:
        raise SlurmUnreachable(f"scontrol: {slurm.first_line(done.stderr)}")
    return {sample.name: sample for sample in parse(done.stdout)}


def parse(text: str) -> list[NodeSample]:
    """The nodes in scontrol's answer, one in each line."""
    rows = (fields(line) for line in text.splitlines())
    return [_sample(row) for row in rows if row.get("NodeName")]


def _sample(row: dict[str, str]) -> NodeSample:
    total, threads = whole(row.get("CPUTot", "")), max(1, whole(row.get("ThreadsPerCore", "")))
    reserved = whole(row.get("CoreSpecCount", "")) * threads
    cores = whole(row.get("Sockets", "")) * whole(row.get("CoresPerSocket", ""))
    return NodeSample(
        row["NodeName"],
        # CPUEfctv is there since Slurm 22.05.
        whole(row.get("CPUEfctv", "")) or max(0, total - reserved),
        cores,
        threads,
        max(0, whole(row.get("RealMemory", "")) - whole(row.get("MemSpecLimit", ""))),
        row.get("Arch", ""),
        " ".join(row.get("OS", "").split()[:2]),
        row.get("NodeAddr", "").partition(".")[0],
    )
