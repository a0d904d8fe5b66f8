"""The ranks of an attempt, as the supervisor knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcddp.attempt.exit_codes import HUNG
from hpcddp.attempt.link.channel import Channel

DECIDE = 10.0  # seconds for the ranks to tell which step they hold
HURRY = 3.0  # the same in a hang, as some cannot
SAVE = 120.0  # seconds for them to save it


@dataclass(frozen=True)
class Held:
    """What the ranks of a node hold after the loss of another one.

    Args:
        waits: global rank -> the step that it holds, its replica, and the number of the replica's
            ranks; of those that wait for the verdict, or save.
        saved: those that have saved.
        busy: the number of those that have not answered.
    """

    waits: dict[int, tuple[int, int, int]]
    saved: set[int]
    busy: int


@dataclass
class RunningRanks:
    """An attempt, and what has become of its ranks.

    Args:
        asker: the connection to the process that waits for their end.
        least, most: the number of its nodes.
        kill_wait: seconds between TERM and KILL for ranks that are ended.
        patience: seconds for the parents to come.
        suffix: of a node's name, for MASTER_ADDR.
        environ: the variables of the attempt.
        without: the hosts that are not to be used again.
        nodes: its nodes, in the order of the ranks; empty until all parents are there.
        codes: exit code by node, of those that have ended.
        written: the nodes whose last lines are in the log.
        lost: host -> why it is lost.
        failed: when ranks failed, and the others were told, in seconds since the epoch; 0 before.
        code: of the node that failed first, or of the signal that ended it before its start.
        deadline: for the ranks that have been told to end.
        alarm: when the others were asked for their steps after a failure, or some were chosen; 0
            for no time.
        chosen: the ranks that save the newest step.
        tried: those that were chosen and have failed.
        held: by node, what its ranks have told since then.
    """

    number: int
    asker: Channel
    least: int
    most: int
    kill_wait: float
    patience: float
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
    alarm: float = 0.0
    chosen: list[int] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)
    held: dict[int, Held] = field(default_factory=dict)

    def verdict(self, clock: float) -> list[int] | None:
        """The ranks that are to save the newest step from now on; empty if all are to leave, None
        if there is nothing to say now.

        Args:
            clock: in the seconds of ``alarm``.
        """
        held = self.held.values()
        if self.chosen:
            saved = {rank for node in held for rank in node.saved}
            if saved.issuperset(self.chosen):
                return []
            busy = saved.union(*(node.waits for node in held)).issuperset(self.chosen)
            if busy and clock < self.alarm + SAVE:
                return None
            self.tried.update(self.chosen)
        elif not self._answered and clock < self.alarm + (HURRY if self.code == HUNG else DECIDE):
            return None
        self.chosen, self.alarm = self._newest, clock
        return self.chosen

    @property
    def _answered(self) -> bool:
        """Whether all ranks that are left have told what they hold."""
        told = len(self.held) + len(self.codes) == len(self.nodes)
        return told and not any(node.busy for node in self.held.values())

    @property
    def _newest(self) -> list[int]:
        """The ranks of a whole replica that hold the newest step; empty if none is whole."""
        sets: dict[tuple[int, int], list[int]] = {}
        whole = []
        for held in self.held.values():
            for rank, (step, replica, members) in held.waits.items():
                mine = sets.setdefault((-step, replica), [])
                mine.append(rank)
                if len(mine) == members and not self.tried & {*mine}:
                    whole.append((-step, replica))
        return sorted(sets[min(whole)]) if whole else []
