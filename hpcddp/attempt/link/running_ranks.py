"""The ranks of an attempt, as the supervisor knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcddp.attempt.link.channel import Channel
from hpcddp.attempt.link.newest_step import NewestStep


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
    nodes: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    failed: float = 0.0
    code: int = 0
    deadline: float = float("inf")
    late: float = float("inf")
    newest: NewestStep | None = None
