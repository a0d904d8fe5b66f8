"""Site: the configuration of a Slurm that matters for stops and requeues."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import commands as slurm
from hpcddp.slurm.commands import TIMEOUT


class Site(NamedTuple):
    """Rules of a site and one partition; the defaults are Slurm's."""

    version: str = ""
    preempt_mode: str = "OFF"  # effect of a preemption on jobs of the partition
    grace: int = 0  # seconds between the notice of a preemption and its end
    kill_wait: int = 30  # seconds between TERM and KILL
    requeue: bool = True  # default of sbatch --requeue
    hold: int = 121  # seconds that a requeued job waits at least
    tracking: str = ""  # of processes: cgroup, linuxproc, pgid
    user_signal: bool = False  # preemption sends the job's own signal instead of TERM
    limit: str = ""  # default time limit, in Slurm's forms
    routed: bool = False  # a plugin may choose a job's partition
    cluster: str = ""  # its name at Slurm

    @property
    def outlives(self) -> bool:
        """Whether a process can outlive its job: not if cgroups track processes."""
        return self.tracking in ("linuxproc", "pgid")

    @property
    def preempts(self) -> bool:
        """Whether a preemption ends jobs of the partition; suspension does not."""
        return self.preempt_mode in ("REQUEUE", "CANCEL")

    @property
    def notice(self) -> int:
        """Seconds from the first signal of a preemption to the KILL."""
        return self.grace + self.kill_wait


def read(partition: str = "", timeout: float = TIMEOUT) -> Site:
    """Read `scontrol show config` and `show partition`.

    Args:
        partition: its name; "" for the default partition.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    said = config(timeout)
    rows = slurm.call("scontrol", "--oneliner", "show", "partition", timeout=timeout).stdout
    return of(said, rows, partition)


def of(said: Mapping[str, str], rows: str, partition: str = "") -> Site:
    """The rules in Slurm's answers.

    Args:
        said: the configuration.
        rows: of `scontrol --oneliner show partition`.
        partition: its name; "" for the default partition.
    """
    fields = _partition(rows, partition)
    mode = str(fields.get("PreemptMode", said.get("PreemptMode", "OFF")))
    preempts = said.get("PreemptType", "").endswith(("partition_prio", "qos"))
    expire = re.search(r"cred_expire=(\d+)", said.get("AuthInfo", ""))
    return Site(
        version=said.get("SLURM_VERSION", ""),
        preempt_mode=mode.split(",")[-1] if preempts else "OFF",
        grace=_number(fields.get("GraceTime", "0")),
        kill_wait=_number(said.get("KillWait", "30")),
        requeue=said.get("JobRequeue", "1") != "0",
        hold=int(expire[1]) + 1 if expire else 121,
        tracking=said.get("ProctrackType", "").rpartition("/")[2],
        user_signal="preempt_send_user_signal" in said.get("SlurmctldParameters", "").lower()
        or "send_user_signal" in said.get("PreemptParameters", "").lower(),
        limit=_limit(fields),
        routed=said.get("JobSubmitPlugins", "") not in ("", "(null)"),
        cluster=said.get("ClusterName", ""),
    )  # fmt: skip


def config(timeout: float = TIMEOUT) -> dict[str, str]:
    """The configuration in `scontrol show config`, by the names of slurm.conf(5).

    Raises:
        SlurmUnreachable: there is no answer, or Slurm is installed and not configured.
    """
    done = slurm.call("scontrol", "show", "config", timeout=timeout)
    if done.returncode:
        raise SlurmUnreachable(slurm.first_line(done.stderr))
    return dict(re.findall(r"^(\w+)\s*= ?(.*?)\s*$", done.stdout, re.MULTILINE))


def _partition(rows: str, name: str) -> dict[str, str]:
    """The fields of a partition, or of the default one."""
    for row in rows.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", row))
        if fields.get("PartitionName") == name or (not name and fields.get("Default") == "YES"):
            return fields
    return {}


def _limit(fields: dict[str, str]) -> str:
    """A partition's default time limit."""
    asked = fields.get("DefaultTime", "NONE")
    return fields.get("MaxTime", "") if asked == "NONE" else asked


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
