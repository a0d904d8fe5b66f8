"""The reservations of a Slurm, among them its maintenance windows."""

from __future__ import annotations

from dataclasses import dataclass

from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import commands as slurm
from hpcddp.slurm.partitions import fields, listed

ALL = ("ALL_NODES", "(ALL)")


@dataclass
class Reservation:
    """Nodes that are kept for some users, or for maintenance, between two times.

    Args:
        start: seconds since the epoch.
        end: seconds since the epoch.
        hosts: host list; "" where all nodes are reserved.
        maintenance: no job of a user runs in it.
        users: that may use it; empty where only accounts count.
    """

    name: str
    start: float
    end: float
    hosts: str = ""
    nodes: int = 0
    partition: str = ""
    maintenance: bool = False
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()


def read(timeout: float = slurm.TIMEOUT) -> list[Reservation]:
    """The reservations that the user may see, the earliest first.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    done = slurm.call("scontrol", "--oneliner", "show", "reservation", timeout=timeout)
    if done.returncode:
        raise SlurmUnreachable(f"scontrol: {slurm.first_line(done.stderr)}")
    return parse(done.stdout)


def parse(text: str) -> list[Reservation]:
    """The reservations in scontrol's answer, one in each line."""
    made = []
    for line in text.splitlines():
        row = fields(line)
        start, end = slurm.moment(row.get("StartTime", "")), slurm.moment(row.get("EndTime", ""))
        if not row.get("ReservationName") or start is None or end is None:
            continue
        flags = row.get("Flags", "").split(",")
        hosts = "" if "ALL_NODES" in flags or row.get("Nodes") in ALL else row.get("Nodes", "")
        count = row.get("NodeCnt", "")
        made.append(Reservation(
            row["ReservationName"], start, end, "" if hosts == "(null)" else hosts,
            int(count) if count.isdecimal() else 0, _text(row.get("PartitionName", "")),
            "MAINT" in flags, listed(row.get("Users", "")), listed(row.get("Accounts", "")),
        ))  # fmt: skip
    return sorted(made, key=lambda row: row.start)


def _text(text: str) -> str:
    return "" if text == "(null)" else text
