"""The accounts and QOS of the user with their limits, from sacctmgr: a Slurm without accounting has
none.

The names of the fields are those of sacctmgr(1). What a site keeps private is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import other_clusters

ASSOCIATION = (
    "DefaultAccount", "Account", "Partition", "QOS", "DefaultQOS", "MaxJobs", "MaxSubmit",
    "MaxWall", "MaxTRES", "GrpTRES", "GrpTRESMins", "MaxTRESPerNode", "MaxTRESMins",
)  # fmt: skip
QOS = (
    "Name", "Flags", "GraceTime", "Preempt", "PreemptMode", "MaxWall", "MinTRES", "MaxTRES",
    "MaxTRESPU", "MaxJobsPU", "MaxSubmitPU", "GrpTRES", "MaxTRESPerNode", "MaxTRESMins",
)  # fmt: skip


@dataclass
class Association:
    """What a user may do under an account, in one partition or in all.

    Args:
        default: whether this account is the user's default.
        partition: "" for all.
        qos: that may be used; empty where Slurm does not say.
        max_wall: the longest time limit, in Slurm's forms; "" for none.
        max_tres: most of each resource in a job: node, cpu, mem, gres/gpu, ...
        group_tres: most of each that all jobs of the account may hold together.
        group_minutes: most of each, times minutes, that the account may use.
        node_tres: most of each that a job may have on a node.
        max_minutes: most of each, times the minutes of its time limit, in a job.
    """

    account: str
    default: bool = False
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    max_jobs: int | None = None
    max_submit: int | None = None
    max_wall: str = ""
    max_tres: dict[str, int] = field(default_factory=dict)
    group_tres: dict[str, int] = field(default_factory=dict)
    group_minutes: dict[str, int] = field(default_factory=dict)
    node_tres: dict[str, int] = field(default_factory=dict)
    max_minutes: dict[str, int] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether any job can be submitted under it: some sites have accounts that refuse all."""
        return _usable(self.max_jobs) and _usable(self.max_submit)


@dataclass
class Qos:
    """A QOS; the units are those of Association."""

    name: str
    flags: tuple[str, ...] = ()
    grace: int = 0  # seconds
    preempts: tuple[str, ...] = ()  # names of QOS
    preempt_mode: str = ""  # "" for the cluster's
    max_wall: str = ""
    min_tres: dict[str, int] = field(default_factory=dict)
    max_tres: dict[str, int] = field(default_factory=dict)
    user_tres: dict[str, int] = field(default_factory=dict)  # of all jobs of a user
    max_jobs: int | None = None
    max_submit: int | None = None
    group_tres: dict[str, int] = field(default_factory=dict)
    node_tres: dict[str, int] = field(default_factory=dict)
    max_minutes: dict[str, int] = field(default_factory=dict)


@dataclass
class Budget:
    """What an account may use in all (GrpTRESMins), and what it has used, in minutes of each
    resource.

    Args:
        user: "" for all of the account.
    """

    account: str
    user: str
    limit: dict[str, int]
    used: dict[str, int]

    def left(self, name: str) -> float:
        """Hours of a resource that are left."""
        return max(0, self.limit[name] - self.used.get(name, 0)) / 60

    def __str__(self) -> str:
        owner = f"{self.account} ({self.user})" if self.user else self.account
        rows = [f"{self.left(name):.6g} of {most / 60:.6g} {name} hours left"
                for name, most in self.limit.items()]  # fmt: skip
        return f"{owner}: {', '.join(rows)}"


def _usable(limit: int | None) -> bool:
    return limit is None or limit > 0


def associations(user: str, cluster: str = "", timeout: float = slurm.TIMEOUT) -> list[Association]:
    """The user's associations on a cluster.

    Raises:
        SlurmUnreachable: there is no accounting, or no answer.
    """
    where = ["user", f"name={user}", *([f"cluster={cluster}"] if cluster else []), "withassoc"]
    rows = _ask(where, ASSOCIATION, timeout)
    return [
        Association(
            row["Account"], row["Account"] == row["DefaultAccount"], row["Partition"],
            _names(row["QOS"]), row["DefaultQOS"],
            _whole(row["MaxJobs"]), _whole(row["MaxSubmit"]), row["MaxWall"],
            tres(row["MaxTRES"]), tres(row["GrpTRES"]), tres(row["GrpTRESMins"]),
            tres(row["MaxTRESPerNode"]), tres(row["MaxTRESMins"]),
        )
        for row in rows
    ]  # fmt: skip


def qos(timeout: float = slurm.TIMEOUT) -> list[Qos]:
    """All QOS.

    Raises:
        SlurmUnreachable: there is no accounting, or no answer.
    """
    return [
        Qos(
            row["Name"], _names(row["Flags"]), seconds(row["GraceTime"]), _names(row["Preempt"]),
            "" if row["PreemptMode"] == "cluster" else row["PreemptMode"].upper(), row["MaxWall"],
            tres(row["MinTRES"]), tres(row["MaxTRES"]), tres(row["MaxTRESPU"]),
            _whole(row["MaxJobsPU"]), _whole(row["MaxSubmitPU"]), tres(row["GrpTRES"]),
            tres(row["MaxTRESPerNode"]), tres(row["MaxTRESMins"]),
        )
        for row in _ask(["qos"], QOS, timeout)
    ]  # fmt: skip


def budgets(timeout: float = slurm.TIMEOUT) -> list[Budget]:
    """The budgets of the user and the user's accounts (sshare(1)).

    Raises:
        SlurmUnreachable: there is no accounting, or no answer.
    """
    fields = "--format=Account,User,GrpTRESMins,GrpTRESRaw"
    clusters = other_clusters.names()  # sshare does not know the variable for them
    where = [f"--clusters={clusters}"] if clusters else []
    done = slurm.call("sshare", "--noheader", "--parsable2", fields, *where, timeout=timeout)
    if done.returncode:
        raise SlurmUnreachable(f"sshare: {slurm.first_line(done.stderr or done.stdout)}")
    rows = (line.split("|") for line in done.stdout.splitlines() if line.count("|") == 3)
    made = [Budget(account.strip(), user, tres(limit), tres(used))
            for account, user, limit, used in rows]  # fmt: skip
    return [budget for budget in made if budget.limit]


def _ask(what: Sequence[str], names: tuple[str, ...], timeout: float) -> Iterator[dict[str, str]]:
    """Rows of sacctmgr by the names of their fields."""
    options = ("--noheader", "--parsable2", "--readonly", "show")
    done = slurm.call("sacctmgr", *options, *what, f"format={','.join(names)}", timeout=timeout)
    if done.returncode:
        words = slurm.first_line(done.stderr or done.stdout)
        raise SlurmUnreachable(f"sacctmgr: {words}")
    rows = (line.split("|") for line in done.stdout.splitlines())
    return (dict(zip(names, row)) for row in rows if len(row) == len(names))  # noqa: B905


def tres(text: str) -> dict[str, int]:
    """Limits such as `cpu=64,gres/gpu:a100=4,mem=1T`; memory in MB."""
    rows = re.findall(r"([\w/:.+-]+)=(\d+(?:\.\d+)?)([KMGTP]?)", text)
    return {name: _amount(name, float(number), unit) for name, number, unit in rows}


def _amount(name: str, number: float, unit: str) -> int:
    powers = {"K": -1, "M": 0, "": 0, "G": 1, "T": 2, "P": 3}
    factor = 1024.0 ** powers[unit] if name in ("mem", "bb") else 1.0
    return int(number * factor)


def seconds(text: str) -> int:
    """A time such as 1-02:03:04 or 00:00:30 of sacctmgr in seconds; 0 for none and other forms."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+)*)", text)
    if not match:
        return 0
    total = 0
    for number in match[2].split(":"):
        total = 60 * total + int(number)
    return total + 86400 * int(match[1] or 0)


def _names(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
