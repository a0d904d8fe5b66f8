"""Step 11: all ranks stop after the same optimizer step, or none does.

A signal reaches the ranks at different times. If one rank exited alone, the others would hang in a
collective. So the ranks vote: each brings its own flag, and the maximum counts for all. A vote in
every step would cost more than a short step, so votes are about ``SECONDS`` apart. With short steps
a vote is counted one step after it was cast, so that it travels while the ranks compute. Rank 0
chooses the distance and sends it in the vote itself: every rank must enter the same vote. The
findings of the detector (divergence.py) are part of the vote.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from hpcddp.errors import RunError
from hpcddp.preempt import Preemption
from hpcddp.rundir import read_json
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.rank.world import World

SECONDS = 0.2  # between two votes; a stop is agreed within a quarter of a second, or one step
REQUEST_SECONDS = 1.0  # between two checks of the run folder for a stop request
LIMIT_SECONDS = 20.0  # the same, for a changed time limit
QUICK = 4  # if votes are this many ticks apart, a vote is counted one tick after it was cast
GROWTH = 8  # limits the distance: one quick step among slow ones must not delay the next vote
GO, STOP, FENCED = range(3)  # the votes of a rank; the greatest counts


class Detector(Protocol):
    """Looks for bad numbers: divergence.py."""

    def bad(self) -> bool:
        """Whether this rank has bad numbers."""

    def suspect(self, step: int, number: Callable[[torch.Tensor], float | complex]) -> bool:
        """Whether a loss of this rank until a step is bad; in another thread than the loop's."""

    def settle(self, step: int, bad: bool) -> None:
        """Continue, or raise on all ranks if one of them had bad numbers up to this step."""

    def refer_to(self, loss: float | None) -> None:
        """Use the run's first loss as the reference."""


class NoDetector:
    """For a user's own loop, which checks its numbers itself."""

    def bad(self) -> bool:
        return False

    def suspect(self, step: int, number: Callable[[torch.Tensor], float | complex]) -> bool:
        return False

    def settle(self, step: int, bad: bool) -> None:
        pass

    def refer_to(self, loss: float | None) -> None:
        pass


class _Cast(NamedTuple):
    """A vote that was cast and is not counted yet."""

    tick: int
    step: int
    votes: torch.Tensor
    work: dist.Work | None


class StopVote:
    """The agreement on stopping, at step boundaries.

    Args:
        request: the file of the run folder that holds a stop request.
        lease: shows whether a newer attempt owns the run folder.
        detector: looks for bad numbers, in the same vote.
        deadline: end of the time limit, in seconds since the epoch, as the attempt began; 0 for
            none. A later limit counts as soon as it is in the run folder.
        lead: seconds before the deadline at which the save must start.
    """

    def __init__(
        self,
        world: World,
        preemption: Preemption,
        request: Path,
        lease: Lease,
        detector: Detector,
        deadline: float = 0.0,
        lead: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._world = world
        self._preemption = preemption
        self._request = request
        self._lease, self._detector = lease, detector
        self._deadline, self._lead = deadline, lead
        self.by = ""  # the reason for the stop on this rank: a signal, a request, the time limit
        self.when: float | None = None  # seconds since the epoch
        self._stopped = 0.0  # time of the agreement
        self._next_look = self._next_limit = 0.0
        self._interval = 1
        self._step_s = 0.0
        self._last: tuple[int, float] | None = None
        self._next = 0
        self._cast: _Cast | None = None  # a vote that is not counted yet

    def asked_by(self) -> tuple[str, float]:
        """The signal or request for the stop, and its time, in seconds since the epoch. If another
        rank was asked first, this rank's signal usually arrives during the save."""
        if not self.by and self._preemption.requested:
            self.by, self.when = self._preemption.signal or "asked", self._preemption.when
        return self.by or "another rank", self.when or self._stopped

    def agreed(self, tick: int, *, step: int | None = None, now: bool = False) -> bool:
        """Whether all ranks stop here. A collective if a vote is due.

        Args:
            tick: number of possible stops so far: optimizer steps, or batches of evaluations.
            step: optimizer steps taken, if ticks count something else.
            now: vote even if none is due; the same on all ranks.

        Raises:
            Diverged, RollBack: on all ranks, if one had bad numbers.
            LeaseLost: on all ranks, if a newer attempt owns the run folder.
        """
        if self._cast and self._count():
            return True
        if tick < self._next and not now:
            return False
        later = self.quick and not now
        self._vote(tick, tick if step is None else step)
        return False if later else self._count()

    @property
    def quick(self) -> bool:
        """Whether ticks are so short that messages between ranks travel meanwhile; the same on all
        ranks."""
        return self._interval >= QUICK

    def _vote(self, tick: int, step: int) -> None:
        """Cast this rank's vote. It is counted at once, or at the next tick."""
        clock = time.monotonic()
        ballot = [self._wish(clock), int(self._detector.bad()), self._choose(tick, clock)]
        votes = torch.tensor(ballot if self._world.is_main else [*ballot[:2], 0])
        work = None
        if self._world.size > 1:
            group = self._world.control
            work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=group, async_op=True)
        self._cast = _Cast(tick, step, votes, work)

    def _count(self) -> bool:
        """The result of the vote of all ranks."""
        assert self._cast
        cast, self._cast = self._cast, None
        if cast.work:
            cast.work.wait()
        wish, bad, self._interval = cast.votes.tolist()
        self._next = cast.tick + self._interval
        if wish == FENCED:
            self._lease.lost = True
            raise self._lease.error()
        self._detector.settle(cast.step, bool(bad))
        self._stopped = time.time()
        return bool(wish == STOP)

    def _choose(self, tick: int, clock: float) -> int:
        """Ticks until the next vote, from the time that the last ones took."""
        last, self._last = self._last, (tick, clock)
        if last is None or tick <= last[0]:
            return 1
        self._step_s = max((clock - last[1]) / (tick - last[0]), 1e-6)
        return max(1, min(int(SECONDS / self._step_s), GROWTH * self._interval))

    def _wish(self, clock: float) -> int:
        """This rank's vote. On any rank, a save may have found that the lease is lost."""
        if self._lease.lost or (self._world.is_main and not self._lease.look(clock)):
            return FENCED
        return STOP if self._wanted(clock) else GO

    def _wanted(self, clock: float) -> bool:
        """Whether this rank has a stop request: a signal or, on rank 0, one in the run folder.

        A signal before Python has installed its handlers is lost; the run folder keeps its request.
        """
        if not self.by:
            if self._preemption.requested:
                self.by = self._preemption.signal or "asked"
            elif self._world.is_main:
                self.by = self._looked(clock)
            self.when = self._preemption.when or (time.time() if self.by else None)
        return bool(self.by)

    def _looked(self, clock: float) -> str:
        """Rank 0's reason to stop: the time limit, or a request in the run folder; "" for none."""
        if clock >= self._next_limit:
            self._next_limit = clock + LIMIT_SECONDS
            self._learn_limit()
        lead = self._lead() + 2 * self._step_s
        if self._deadline and time.time() + lead > self._deadline:
            return "time limit"
        if clock < self._next_look:
            return ""
        self._next_look = clock + REQUEST_SECONDS
        with contextlib.suppress(RunError):
            return str((read_json(self._request) or {}).get("want", ""))
        return ""

    def _learn_limit(self) -> None:
        """Read the current time limit, as Slurm reported it."""
        with contextlib.suppress(RunError):
            facts = read_json(self._lease.run.attempt(self._lease.attempt).slurm) or {}
            self._deadline = float(facts.get("deadline", self._deadline) or 0)
