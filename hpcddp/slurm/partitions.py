"""The partitions of a Slurm with their limits, from `scontrol show partition`.

The names of the fields are those of slurm.conf(5). A release that lacks a field leaves its default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import commands as slurm

FIELD = re.compile(r"(?:^|\s)([A-Za-z]\w*)=")
NONE = ("", "NONE", "N/A", "(null)", "UNLIMITED", "INFINITE")


@dataclass
class Partition:
    """A partition.

    Args:
        max_time: the longest time limit of a job, in Slurm's forms; "" for none.
        default_time: that of a job that asks for none; "" for max_time.
        min_nodes: of a job.
        max_nodes: of a job; None for no limit.
        accounts: that may use it; empty for all.
        denied_accounts: that may not.
        qos: that may be used in it; empty for all.
        denied_qos: that may not.
        groups: Unix groups that may use it; empty for all.
        own_qos: the QOS whose limits hold for the whole partition; "" for none.
        preempt_mode: what a preemption does to its jobs, as the partition has it.
        grace: seconds between the notice of a preemption and its end.
        default_memory: of a job that asks for none: (node, cpu or gpu, MB); ("", 0) for all.
        max_memory: in the same form.
        cpus_per_gpu: CPUs that a job gets for each GPU if it asks for none; 0 for no rule.
    """

    name: str
    default: bool = False
    state: str = "UP"
    hidden: bool = False
    root_only: bool = False
    total_nodes: int = 0
    max_time: str = ""
    default_time: str = ""
    min_nodes: int = 0
    max_nodes: int | None = None
    accounts: tuple[str, ...] = ()
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    denied_qos: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    own_qos: str = ""
    priority: int = 1
    preempt_mode: str = ""
    grace: int = 0
    default_memory: tuple[str, int] = ("", 0)
    max_memory: tuple[str, int] = ("", 0)
    max_cpus_per_node: int | None = None
    cpus_per_gpu: int = 0
    exclusive: bool = False
    tres: dict[str, str] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether a job of an ordinary user can be submitted to it, and run."""
        return self.state == "UP" and not self.root_only


def ask(timeout: float = slurm.TIMEOUT) -> str:
    """What scontrol says of all partitions, hidden ones too: one line for each.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    done = slurm.call("scontrol", "--all", "--oneliner", "show", "partition", timeout=timeout)
    if done.returncode:
        raise SlurmUnreachable(f"scontrol: {slurm.first_line(done.stderr)}")
    return done.stdout


def read(timeout: float = slurm.TIMEOUT) -> list[Partition]:
    """All partitions; SlurmUnreachable if there is no answer."""
    return parse(ask(timeout))


def parse(text: str) -> list[Partition]:
    """The partitions in scontrol's answer, one in each line."""
    rows = (fields(line) for line in text.splitlines())
    return [_partition(row) for row in rows if row.get("PartitionName")]


def fields(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol --oneliner`: a value ends before the next name."""
    marks = list(FIELD.finditer(line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)]
    return {m[1]: line[m.end() : end].strip() for m, end in zip(marks, ends)}  # noqa: B905


def _partition(row: Mapping[str, str]) -> Partition:
    defaults = dict(re.findall(r"(\w+)=(\d+)", row.get("JobDefaults", "")))
    return Partition(
        name=row["PartitionName"],
        default=row.get("Default") == "YES",
        state=row.get("State", "UP"),
        hidden=row.get("Hidden") == "YES",
        root_only=row.get("RootOnly") == "YES",
        total_nodes=_whole(row.get("TotalNodes", "")) or 0,
        max_time=_text(row.get("MaxTime", "")),
        default_time=_text(row.get("DefaultTime", "")),
        min_nodes=_whole(row.get("MinNodes", "")) or 0,
        max_nodes=_whole(row.get("MaxNodes", "")),
        accounts=listed(row.get("AllowAccounts", "")),
        denied_accounts=listed(row.get("DenyAccounts", "")),
        qos=listed(row.get("AllowQos", "")),
        denied_qos=listed(row.get("DenyQos", "")),
        groups=listed(row.get("AllowGroups", "")),
        own_qos=_text(row.get("QoS", "")),
        priority=_whole(row.get("PriorityTier", "")) or 1,
        preempt_mode=_text(row.get("PreemptMode", "")),
        grace=_whole(row.get("GraceTime", "")) or 0,
        default_memory=default_memory(row),
        max_memory=_memory(row, "Max"),
        max_cpus_per_node=_whole(row.get("MaxCPUsPerNode", "")),
        cpus_per_gpu=int(defaults.get("DefCpuPerGPU", 0)),
        exclusive=row.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        tres=dict(re.findall(r"([\w/:.+-]+)=([^,\s]+)", row.get("TRES", ""))),
    )


def default_memory(row: Mapping[str, str]) -> tuple[str, int]:
    """The memory of a job that asks for none, by the fields of a partition or of the configuration:
    of what, and MB; ("", 0) for no default."""
    if gpus := re.search(r"DefMemPerGPU=(\d+)", row.get("JobDefaults", "")):
        return "gpu", int(gpus[1])
    return _memory(row, "Def")


def _memory(row: Mapping[str, str], which: str) -> tuple[str, int]:
    """A default or a limit of memory: of what, and MB."""
    for name, of in (("PerNode", "node"), ("PerCPU", "cpu")):
        if number := _whole(row.get(f"{which}Mem{name}", "")):
            return of, number
    return "", 0


def listed(text: str) -> tuple[str, ...]:
    """A list of names; empty for ALL and for none."""
    words = text.strip()
    return () if words == "ALL" or words in NONE else tuple(words.split(","))


def _text(text: str) -> str:
    return "" if text.strip() in NONE else text.strip()


def _whole(text: str) -> int | None:
    """A whole number; None for no limit."""
    return int(text) if text.strip().isdecimal() else None
