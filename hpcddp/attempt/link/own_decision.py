"""Who saves the newest step, where parents have lost the supervisor: each decides for its ranks.

A parent whose ranks have a whole state decides at once. Where a replica spans several nodes, their
parents tell each other in the run folder what their ranks hold. A network file system may show a
file late, but these parents know no addresses of each other. Names in ``.saving-N``:

    held-R-NODE       what the ranks of a node hold, one of them of replica R
    step-S-claim-K    the replica that saves step S, where K - 1 others could not
    over-R            replica R saves nothing more
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpcddp.attempt.link.newest_step import DECIDE, NewestStep, NodeShares
from hpcddp.errors import RunError
from hpcddp.rundir import RunDir, read_json, write_json

LOOK = 1.0  # seconds between two looks at what other parents tell
SHOWN = 60.0 + DECIDE  # seconds until their files are seen: NFS keeps the list of a folder for 60
CLAIM, OVER = "-claim-", "over-"


class OwnDecision:
    """The decision of one parent.

    Args:
        node: the number of its node.
        clock: now, in seconds.
    """

    def __init__(self, run: RunDir, attempt: int, node: int, clock: float) -> None:
        self._folder, self._node = run.saving(attempt), node
        self._newest = NewestStep(1, clock)
        self._replicas = set[int]()  # those of its ranks
        self._tried: list[int] = []  # replicas that were chosen; the last one may save now
        self._shown: dict[str, Any] = {}  # in the run folder
        self._next_look = 0.0
        self._over = False

    def verdict(self, report: dict[str, Any], clock: float) -> list[int] | None:
        """The ranks that are to save from now on, some of this node among them; empty if those of
        this node are to leave, None if there is nothing to say now.

        Args:
            report: what the ranks of this node hold.
        """
        if self._over:
            return None
        mine = NodeShares.of(report)
        self._newest.held[self._node] = mine
        self._replicas |= {share.replica for share in mine.waits.values()}
        divided = bool(report["divided"])
        if divided:
            self._show(report)
        leaves = divided and self._looked(mine, clock)
        chosen = [] if leaves else self._newest.verdict(clock)
        if chosen:
            chosen = self._newest.chosen = self._claimed(chosen, mine)
        self._over = chosen == []
        if self._over:
            self._end(report if divided else {})
        return chosen

    def _end(self, report: dict[str, Any]) -> None:
        """Tell others that the ranks of this node leave."""
        if report:
            self._show({**report, "waits": {}})
        with contextlib.suppress(OSError):
            for replica in self._replicas.intersection(self._tried):
                (self._folder / f"{OVER}{replica}").touch()

    def _claimed(self, chosen: list[int], mine: NodeShares) -> list[int]:
        """Those of the chosen ranks that save, as far as they are known; empty if none of this node
        does."""
        step, replica = self._newest.share_of(chosen[0])[:2]
        replica = claim(self._folder, step, replica, self._tried)
        ranks = self._newest.waiting.get((step, replica), [])
        self._tried.append(replica)
        return ranks if mine.waits.keys() & {*ranks} else []

    def _looked(self, mine: NodeShares, clock: float) -> bool:
        """See what other parents tell; whether there is nothing left to do for this node."""
        newest = self._newest
        if not (mine.waits or mine.busy or mine.saved):
            return True
        with contextlib.suppress(OSError, RunError):
            if clock >= self._next_look:
                self._next_look = clock + LOOK
                if not self._folder.is_dir() or self._saved_elsewhere(mine):
                    return True
                for path in self._others():
                    if theirs := read_json(path):
                        node = int(path.name.rpartition("-")[2])
                        newest.held[node] = NodeShares.of(theirs).only(self._replicas)
        # The number of other nodes that may answer is not known.
        newest.nodes = len(newest.held) + (not newest.whole)
        newest.patience = DECIDE if newest.whole else SHOWN
        return False

    def _saved_elsewhere(self, mine: NodeShares) -> bool:
        """Whether another replica saves the newest step of this node, or a newer one."""
        step = max((share.step for share in mine.waits.values()), default=0)
        return not mine.busy and any(
            int(path.name.split("-")[1]) >= step and int(path.readlink().name) not in self._replicas
            for path in self._folder.glob(f"*{CLAIM}*")
        )

    def _others(self) -> set[Path]:
        """The files of other parents that have ranks of the same replicas."""
        paths = (self._folder.glob(f"held-{replica}-*") for replica in self._replicas)
        by_node = {path.name.rpartition("-")[2]: path for path in itertools.chain(*paths)}
        return {path for node, path in by_node.items() if node != str(self._node)}

    def _show(self, report: dict[str, Any]) -> None:
        """Tell other parents."""
        if report != self._shown:
            with contextlib.suppress(OSError):
                for replica in self._replicas:
                    write_json(self._folder / f"held-{replica}-{self._node}", report)
                self._shown = report


def claim(folder: Path, step: int, replica: int, tried: Collection[int]) -> int:
    """The replica that saves a step, where no supervisor decides: that of the first parent to ask;
    -1 once a newer attempt has begun.

    Args:
        folder: of the attempt's saves.
        tried: replicas that could not.
    """
    with contextlib.suppress(OSError):
        for count in itertools.count(1):
            path = folder / f"step-{step}{CLAIM}{count}"
            try:
                path.symlink_to(str(replica))
            except FileExistsError:
                earlier = int(str(path.readlink()))
                if earlier not in tried:
                    return earlier
            else:
                return replica
    return -1


def unsaved(run: RunDir, attempt: int) -> bool:
    """Whether a step is claimed, not saved, and may still be."""
    folder = run.saving(attempt)
    with contextlib.suppress(OSError):
        return any(
            not (run.checkpoints / path.name.partition(CLAIM)[0]).exists()
            and not (folder / f"{OVER}{path.readlink()}").exists()
            for path in folder.glob(f"*{CLAIM}*")
        )
    return False
