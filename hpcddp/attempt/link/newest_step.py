"""Who saves the newest step after the loss of ranks: the decision of the supervisor, or of a parent
that has lost it.

A replica is a number of ranks that have the whole state together. One whose ranks all wait, with
the newest step, saves it; if one of them fails, another replica does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcddp.rundir import RunDir

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
        over: without a supervisor, all have been told to leave.
    """

    nodes: int
    alarm: float
    patience: float = DECIDE
    held: dict[int, NodeShares] = field(default_factory=dict)
    chosen: list[int] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)
    over: bool = False

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

    def alone(self, run: RunDir, attempt: int, who: str, clock: float) -> list[int] | None:
        """The verdict of a parent without a supervisor: it saves only what no other node does.

        Args:
            who: names the node.
        """
        chosen = None if self.over else self.verdict(clock)
        if chosen and not claim(run, attempt, self._step, who):
            chosen = []
        self.over |= chosen == []
        return chosen

    @property
    def _step(self) -> int:
        """The step that the chosen ranks hold."""
        return max(node.waits[rank].step for node in self.held.values()
                   for rank in self.chosen if rank in node.waits)  # fmt: skip

    @property
    def _answered(self) -> bool:
        """Whether all ranks that are left have told what they hold."""
        return len(self.held) >= self.nodes and not any(node.busy for node in self.held.values())

    @property
    def _newest(self) -> list[int]:
        """The ranks of a whole replica that hold the newest step; empty if none is whole."""
        sets: dict[tuple[int, int], list[int]] = {}
        whole = []
        for held in self.held.values():
            for rank, share in held.waits.items():
                key = -share.step, share.replica
                mine = sets.setdefault(key, [])
                mine.append(rank)
                if len(mine) == share.members and not self.tried & {*mine}:
                    whole.append(key)
        return sorted(sets[min(whole)]) if whole else []


def claim(run: RunDir, attempt: int, step: int, who: str) -> bool:
    """Whether this node is the one to save a step, where no supervisor decides: the first one to
    ask. Once a newer attempt has begun, none is."""
    path = run.saving(attempt) / f"step-{step}-claimed"
    with contextlib.suppress(OSError):
        try:
            path.symlink_to(who)
        except FileExistsError:
            return str(path.readlink()) == who
        return True
    return False
