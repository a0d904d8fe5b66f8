"""The ranks of an attempt, as the supervisor knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcddp.attempt.error_record import host
from hpcddp.attempt.link.channel import Channel
from hpcddp.attempt.link.newest_step import NewestStep
from hpcddp.attempt.link.parents import Parent
from hpcddp.slurm.hostlist_writer import compress_hosts

NODELISTS = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")  # of the ranks


@dataclass
class RunningRanks:
    """An attempt, and what has become of its ranks.

    Args:
        asker: the connection to the process that waits for their end.
        least, most: the number of its nodes.
        kill_wait: seconds between TERM and KILL for ranks that are ended.
        patience: seconds for the parents to come.
        wait: seconds that ranks may run on after those of another node have ended; 0 for no limit.
        suffix: of a node's name, for MASTER_ADDR.
        environ: the variables of the attempt.
        without: the hosts that are not to be used again.
        enough: when enough of them have waited for the others; inf before enough are there.
        nodes: its nodes, in the order of the ranks; empty until all parents are there.
        codes: exit code by node, of those that have ended.
        written: the nodes whose last lines are in the log.
        lost: host -> why it is lost.
        failed: when ranks failed, and the others were told, in seconds since the epoch; 0 before.
        code: of the node that failed first, or of the signal that ended it before its start.
        deadline: for the ranks that have been told to end; late: for those that have not.
        newest: after a failure, who saves the newest step.
    """

    number: int
    asker: Channel
    least: int
    most: int
    kill_wait: float
    patience: float
    wait: float
    suffix: str
    environ: dict[str, str]
    without: list[str] = field(default_factory=list)
    began: float = 0.0
    enough: float = float("inf")
    nodes: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    failed: float = 0.0
    code: int = 0
    deadline: float = float("inf")
    late: float = float("inf")
    newest: NewestStep | None = None

    def start(self, parents: Mapping[int, Parent]) -> None:
        """Order these parents to fork the ranks, in the order of their nodes."""
        self.nodes, hosts = [*parents], [parent.host for parent in parents.values()]
        if self.nodes[0] or hosts[0] != host():  # not on the script's node
            self.environ["MASTER_ADDR"] = hosts[0] + self.suffix
        self.environ |= dict.fromkeys(NODELISTS, compress_hosts(hosts))
        self.asker.send(hosts=hosts)
        for index, parent in enumerate(parents.values()):
            parent.channel.send(
                start=self.number, node=index, nodes=len(hosts), environ=self.environ,
                kill_wait=self.kill_wait,
            )  # fmt: skip
