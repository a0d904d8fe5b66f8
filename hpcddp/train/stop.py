"""Step 11: all ranks stop after the same optimizer step, or none does.

A signal reaches the ranks at different times, and one that left alone would leave the others in a
collective. So they vote: each brings its own flag, and the maximum counts for all. A vote in every
step would cost more than a short step, so votes are some steps apart, as many as take about
``SECONDS``; and where steps are short a vote is counted one step after it was cast, so that it
travels while the ranks compute. Rank 0 chooses the distance and hands it out in the vote itself:
every rank must enter the same vote. The detector's findings (divergence.py) are agreed in it too.
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
REQUEST_SECONDS = 1.0  # between two looks at the run dir, for a request
LIMIT_SECONDS = 20.0  # the same, for a time limit that has changed
QUICK = 4  # ticks between two votes from which on a vote is counted one tick after it was cast
GROWTH = 8  # one quick step among slow ones must not put the next vote far away
GO, STOP, FENCED = range(3)  # the votes of a rank; the greatest counts


class Detector(Protocol):
    """Looks for numbers that went wrong: divergence.py."""

    def bad(self) -> bool:
        """Whether this rank met bad ones."""

    def settle(self, step: int, bad: bool) -> None:
        """Go on, or raise on all ranks, if one of them met bad numbers up to a step."""

    def refer_to(self, loss: float | None) -> None:
        """Take the run's first loss as the measure."""


class NoDetector:
    """A person's own loop judges its numbers itself."""

    def bad(self) -> bool:
        return False

    def settle(self, step: int, bad: bool) -> None:
        pass

    def refer_to(self, loss: float | None) -> None:
        pass


class _Cast(NamedTuple):
    """A vote on its way."""

    tick: int
    step: int
    votes: torch.Tensor
    work: dist.Work | None


class StopVote:
    """The agreement on stopping, at step boundaries.

    Args:
        request: the run dir's file with a person's wish.
        lease: shows whether a newer attempt owns the run dir.
        detector: looks for numbers that went wrong, in the same vote.
        deadline: end of the time limit, in seconds since the epoch, as the attempt began; 0 for
            none. What Slurm says later counts from when it is in the run dir.
        lead: seconds before it at which the ranks must begin to save.
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
        self.by = ""  # what asked this rank to stop: a signal, a request, the time limit
        self.when: float | None = None  # seconds since the epoch
        self._stopped = 0.0  # when all agreed on it
        self._next_look = self._next_limit = 0.0
        self._interval = 1
        self._step_s = 0.0
        self._last: tuple[int, float] | None = None
        self._next = 0
        self._cast: _Cast | None = None  # a vote that is not counted yet

    def asked_by(self) -> tuple[str, float]:
        """The signal or request for the stop, and its time, in seconds since the epoch. Where
        another rank was asked first, this one's signal has mostly come while it saved."""
        if not self.by and self._preemption.requested:
            self.by, self.when = self._preemption.signal or "asked", self._preemption.when
        return self.by or "another rank", self.when or self._stopped

    def agreed(self, tick: int, *, step: int | None = None, now: bool = False) -> bool:
        """Whether all ranks stop here. A collective where a vote is due.

        Args:
            tick: counts the occasions to stop: optimizer steps, or batches of evaluations.
            step: optimizer steps taken, where these are not the ticks.
            now: vote in any case; the same on all ranks.

        Raises:
            Diverged, RollBack: on all ranks, when one met bad numbers.
            LeaseLost: on all ranks, if a newer attempt owns the run dir.
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
        """Whether ticks are so short that what ranks ask each other travels meanwhile; the same
        on all ranks."""
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
        """This rank's vote. A save may have found that the lease is lost, on any rank."""
        if self._lease.lost or (self._world.is_main and not self._lease.look(clock)):
            return FENCED
        return STOP if self._wanted(clock) else GO

    def _wanted(self, clock: float) -> bool:
        """Whether this rank was asked: by a signal or, as rank 0, through the run dir.

        A signal that comes before Python has its handlers is lost; the run dir is not.
        """
        if not self.by:
            if self._preemption.requested:
                self.by = self._preemption.signal or "asked"
            elif self._world.is_main:
                self.by = self._looked(clock)
            self.when = self._preemption.when or (time.time() if self.by else None)
        return bool(self.by)

    def _looked(self, clock: float) -> str:
        """Rank 0's reason to stop: the time limit, or a request in the run dir; "" if neither."""
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
        """Take in what Slurm says now of the time limit."""
        with contextlib.suppress(RunError):
            facts = read_json(self._lease.run.attempt(self._lease.attempt).slurm) or {}
            self._deadline = float(facts.get("deadline", self._deadline) or 0)
