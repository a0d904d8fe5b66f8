"""Step 11: all ranks stop after the same optimizer step, or none does.

A signal reaches the ranks at different times, and one that left alone would leave the others in a
collective. So they vote: each brings its own flag, and the maximum counts for all. A vote in every
step would cost more than a short step, so votes are some steps apart, as many as take about
``SECONDS``. Rank 0 chooses the distance and hands it out in the vote itself: every rank must enter
the same vote.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from hpcddp.errors import RunError
from hpcddp.preempt import Preemption
from hpcddp.rundir import read_json
from hpcddp.train.lease import Lease
from hpcddp.train.world import World

SECONDS = 0.2  # between two votes; a stop is agreed within a quarter of a second, or one step
REQUEST_SECONDS = 1.0  # between two looks at the run dir
GROWTH = 8  # one quick step among slow ones must not put the next vote far away
GO, STOP, FENCED = range(3)  # what a rank can vote for; the greatest counts


class StopVote:
    """The agreement on stopping, at step boundaries."""

    def __init__(self, world: World, preemption: Preemption, request: Path, lease: Lease) -> None:
        self._world = world
        self._preemption = preemption
        self._request = request
        self._lease = lease
        self._asked = False
        self._next_look = 0.0
        self._interval = 1
        self._last: tuple[int, float] | None = None
        self._next = 0

    def agreed(self, step: int, *, now: bool = False) -> bool:
        """Whether all ranks stop after this step. A collective where a vote is due.

        Args:
            step: optimizer steps taken.
            now: vote in any case; the same on all ranks.

        Raises:
            LeaseLost: on all ranks, if a newer attempt owns the run dir.
        """
        if step < self._next and not now:
            return False
        clock = time.monotonic()
        ballot = [self._wish(clock), self._choose(step, clock)]
        if self._world.size > 1:
            votes = torch.tensor(ballot if self._world.is_main else [ballot[0], 0])
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._world.control)
            ballot = votes.tolist()
        self._interval = ballot[1]
        self._next = step + self._interval
        if ballot[0] == FENCED:
            self._lease.lost = True
            raise self._lease.error()
        return ballot[0] == STOP

    def _choose(self, step: int, clock: float) -> int:
        """Steps until the next vote, from the time that the last ones took."""
        last, self._last = self._last, (step, clock)
        if last is None or step <= last[0]:
            return 1
        step_s = max((clock - last[1]) / (step - last[0]), 1e-6)
        return max(1, min(int(SECONDS / step_s), GROWTH * self._interval))

    def _wish(self, clock: float) -> int:
        """What this rank votes for. A save may have found that the lease is lost, on any rank."""
        if self._lease.lost or (self._world.is_main and not self._lease.look(clock)):
            return FENCED
        return STOP if self._wanted(clock) else GO

    def _wanted(self, clock: float) -> bool:
        """Whether this rank was asked: by a signal or, as rank 0, through the run dir.

        A signal that comes before Python has its handlers is lost; the run dir is not.
        """
        if self._world.is_main and not self._asked and clock >= self._next_look:
            self._next_look = clock + REQUEST_SECONDS
            try:
                self._asked = (read_json(self._request) or {}).get("want") in ("stop", "cancel")
            except RunError:
                self._asked = False
        return self._asked or self._preemption.requested
