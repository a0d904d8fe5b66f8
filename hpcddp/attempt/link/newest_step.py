"""Who saves the newest step after the loss of ranks: the decision of the supervisor. Where it is
lost, own_decision.py is what a parent does.

A replica is a number of ranks that have the whole state together. One whose ranks all wait, with
the newest step, saves it; if one of them fails, another replica does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DECIDE = 10.0  # seconds for the ranks to tell which step they hold
HURRY = 3.0  # the same in a hang, as some cannot
SAVE = 120.0  # seconds for them to save it, at least


class Share(NamedTuple):
    """What a rank holds: its step, its replica, the number of the replica's ranks, and the seconds
    that its save may take."""

    step: int
    replica: int
    members: int
    seconds: int


@dataclass(frozen=True)
class NodeShares:
    """What the ranks of a node hold.

    Args:
        waits: by global rank, of those that wait for the verdict, or save.
        saved: those that have saved.
        busy: the number of those that have not answered.
    """

    waits: dict[int, Share]
    saved: set[int]
    busy: int

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> NodeShares:
        """What a parent has told."""
        waits = {int(rank): Share(*facts) for rank, facts in report["waits"].items()}
        return cls(waits, {*report["saved"]}, int(report["busy"]))

    def only(self, replicas: Collection[int]) -> NodeShares:
        """The same without what they hold of other replicas."""
        waits = {rank: share for rank, share in self.waits.items() if share.replica in replicas}
        return NodeShares(waits, self.saved, self.busy)


@dataclass
class NewestStep:
    """The decision.

    Args:
        nodes: the number of nodes with ranks that may answer.
        alarm: when they were asked, or some were chosen, in seconds.
        patience: seconds for the answers.
        held: by node, what its ranks have told.
        chosen: the ranks that save.
        tried: those that were chosen and have failed.
    """

    nodes: int
    alarm: float
    patience: float = DECIDE
    held: dict[int, NodeShares] = field(default_factory=dict)
    chosen: list[int] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)

    def verdict(self, clock: float) -> list[int] | None:
        """The ranks that are to save from now on; empty if all are to leave, None if there is
        nothing to say now.

        Args:
            clock: as ``alarm``.
        """
        held = self.held.values()
        if self.chosen:
            saved = {rank for node in held for rank in node.saved}
            if saved.issuperset(self.chosen):
                return []
            saving = {rank: share.seconds for node in held for rank, share in node.waits.items()}
            late = clock > self.alarm + max(SAVE, *(saving.get(rank, 0) for rank in self.chosen))
            if saved.union(saving).issuperset(self.chosen) and not late:
                return None
            self.tried.update(self.chosen)
        elif clock < self.alarm + self.patience and not self._answered:
            return None
        self.chosen, self.alarm = self._newest, clock
        return self.chosen

    @property
    def whole(self) -> bool:
        """Whether a whole replica waits."""
        return bool(self._newest)

    def share_of(self, rank: int) -> Share:
        """What a rank holds that waits."""
        return next(node.waits[rank] for node in self.held.values() if rank in node.waits)

    @property
    def waiting(self) -> dict[tuple[int, int], list[int]]:
        """The ranks that wait, in order, by their step and replica."""
        sets: dict[tuple[int, int], list[int]] = {}
        shares = (share for node in self.held.values() for share in node.waits.items())
        for rank, share in sorted(shares):
            sets.setdefault((share.step, share.replica), []).append(rank)
        return sets

    @property
    def _answered(self) -> bool:
        """Whether all ranks that are left have told what they hold."""
        return len(self.held) >= self.nodes and not any(node.busy for node in self.held.values())

    @property
    def _newest(self) -> list[int]:
        """The ranks of a whole replica that hold the newest step; empty if none is whole."""
        able = [
            (-step, replica, ranks)
            for (step, replica), ranks in self.waiting.items()
            if len(ranks) == self.share_of(ranks[0]).members and not self.tried & {*ranks}
        ]
        return min(able)[2] if able else []
