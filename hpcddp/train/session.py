"""The part that both training loops share: the saver, the votes on stopping, the records.

The Trainer (trainer.py) makes it, or ``attach`` (attach.py) for a user's own loop, after taking the
lease and choosing the checkpoint to resume from. ``open`` is called when the model and its
optimizer exist, ``begin`` before the first step. All ranks call these methods together, in the
same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcddp.attempt.link.slots import Slot
from hpcddp.preempt import Preemption
from hpcddp.train.checkpoint import checkpoint, snapshot
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.rescue import Rescue
from hpcddp.train.checkpoint.saver import Saver
from hpcddp.train.checkpoint.snapshot import Live, Position
from hpcddp.train.divergence import RollBack
from hpcddp.train.meter import Meter
from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.monitor.slow_ranks import SlowRanks
from hpcddp.train.monitor.trace import Trace
from hpcddp.train.rank.spread import Spread
from hpcddp.train.stop import Detector, StopVote

LEAD = 5.0  # seconds between the end of the last save and the time limit


class Session:
    """The state of one rank in one attempt.

    Args:
        saved: the checkpoint to resume from; None to start at step 0.
        slot: where this rank's parent reads and writes.
        slow: ``metrics.slow``.
        trace: record every step in a file.

    ``at`` is the position of the training, ``meta`` the content of the checkpoint's meta.json.
    """

    saver: Saver
    rescue: Rescue
    trace: Trace
    leaves = True  # a rank that cannot save leaves after the failure of another one
    vote: StopVote  # between two steps
    pause: StopVote  # between two batches of an evaluation, and at the training's end

    def __init__(
        self,
        lease: Lease,
        spread: Spread,
        record: Recorder,
        meter: Meter,
        retry: DiskRetry,
        saved: Path | None,
        *,
        slot: Slot,
        slow: float,
        trace: bool,
    ) -> None:
        self.lease, self.record, self.meter, self.resumed = lease, record, meter, saved
        self.attempt = lease.run.attempt(lease.attempt)
        self.retry, self._spread, self._world = retry, spread, spread.world
        self._slow, self._traced, self._slot = slow, trace, slot
        self._ended = False
        self._pending: tuple[int, int] | None = (
            None  # step and epoch of a record whose sums are not read yet
        )
        self.at, self.meta = Position(), dict[str, Any]()
        if saved:
            self._read(saved)

    def _read(self, folder: Path) -> None:
        self.meta = self.retry.read(lambda: checkpoint.read_meta(folder))
        self.at = snapshot.position(self.meta, folder)

    def open(
        self, live: Live, keep: int, hint: Callable[[], str], *, optimizer: bool, schedule: bool
    ) -> None:
        """Load the checkpoint, if there is one, into the live objects, and prepare to save.

        Args:
            keep: number of checkpoints to keep, the newest.
            hint: advice for a training that waits for its data.
            optimizer, schedule: whether it is the user's own.
        """
        self._live, self._own = live, {"optimizer": optimizer, "schedule": schedule}
        if self.resumed:
            snapshot.require_format(self.resumed, self.meta, live)
        if live.files:
            live.files.resumed = self.resumed
        elif self.resumed:
            self._restore(self.resumed)
        step = self.at.step if self.resumed else None
        self.saver = Saver(self.lease, self._spread, live, self.record, keep, step, self.retry)
        self.rescue = Rescue(
            self._slot, self.lease, self._spread, live, self.saver, keep, self.retry.touch
        )
        world, layout = self._world, self._spread.layout
        stages = [layout.place(rank).pp for rank in range(world.size)]
        self._slow_ranks = SlowRanks(self.record, world.hosts, stages, self._slow, hint)
        path = self.attempt.trace(world.rank.world_rank) if self._traced else None
        self.trace = Trace(path)

    def _restore(self, folder: Path) -> None:
        snapshot.restore(folder, self.meta, self._spread, self._live, self.retry, **self._own)

    def start(self, describe: Callable[[], dict[str, Any]], **facts: Any) -> None:
        """Record the step at which the training starts, with some facts.

        Args:
            describe: the plain data of a checkpoint of the newest step, besides the state.
        """
        path = str(self.resumed.relative_to(self.lease.run.path)) if self.resumed else None
        self.record("start", step=self.at.step, epoch=self.at.epoch, resumed=path, **facts)
        self.rescue.begin(self.at, lambda: self._newest(describe()), leaves=self.leaves)

    def begin(self, preemption: Preemption, detector: Detector, deadline: float) -> None:
        """Start the votes on stopping.

        Args:
            deadline: end of the time limit, in seconds since the epoch; 0 for none.
        """
        self._detector, lease = detector, self.lease
        self.rescue.suspect = detector.suspect

        def vote() -> StopVote:
            request = lease.run.request
            return StopVote(self._world, preemption, request, lease, detector, deadline, self._lead)

        self.vote, self.pause = vote(), vote()

    def _newest(self, facts: dict[str, Any]) -> str:
        """The meta.json of a checkpoint of the newest step.

        Args:
            facts: what the loop adds.
        """
        meta = snapshot.meta(self.lease, self._spread, self._live, self.at, facts)
        return snapshot.text(meta)

    def _lead(self) -> float:
        """Seconds before the time limit at which the save must start."""
        return LEAD + 2 * self.saver.took

    def go_back(self, folder: Path) -> None:
        """Continue from an earlier checkpoint of this run, during the training."""
        self.rescue.change()
        self._read(folder)
        self._restore(folder)
        self.saver.begin_from(self.at.step)
        self.rescue.restart(self.at)
        self._pending = None
        self.meter.reset()

    def add_up(self, epoch: int, bad: Tensor) -> None:
        """Start adding up a record of this step over the ranks.

        Args:
            bad: 1 on the device if this rank has bad numbers.
        """
        self.meter.add_up(bad)
        self._pending = self.at.step, epoch

    def tell(self) -> None:
        """Write the record that ``add_up`` started, if any."""
        if self._pending is None:
            return
        (step, epoch), self._pending = self._pending, None
        values, bad = self.meter.read()
        self._detector.settle(step, bad)
        if values:  # else all steps were skipped
            self._detector.refer_to(values.get("loss"))
            self.record("train" if "loss" in values else "step", step=step, epoch=epoch, **values)
        self._slow_ranks.look(step, values, self.meter.ranks)

    def asked(self, tick: int) -> bool:
        """Whether all ranks agree to stop, now.

        Args:
            tick: the number of votes on ``pause`` so far.
        """
        return self.pause.agreed(tick, step=self.at.step, now=True)

    def end(self, outcome: str, vote: StopVote | None = None, **facts: Any) -> None:
        """Record how the training ended: all is saved.

        Args:
            vote: the vote that stopped it.
        """
        self.tell()
        self.rescue.close()
        self._ended = True
        if vote:
            facts["by"], facts["asked"] = vote.asked_by()
        step, saved = self.at.step, self.saver.saved
        self.record("end", outcome=outcome, step=step, saved=saved, **facts)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Within, a failure of this rank is one of the training."""
        try:
            yield
        except RollBack:
            self.rescue.change()  # the state of this step is not good
            raise
        except Exception as error:
            self._failed(error)
            raise

    def _failed(self, error: BaseException) -> None:
        """After a failure of this rank: save its step without the others, if that is to be done."""
        self.rescue.fail(error)
        self.saver.close()

    def close(self) -> None:
        """Wait a short time for a running save."""
        self.rescue.close()
        self.saver.close()
        self.trace.close()
