"""The run of a user's own training loop, as ``hpcddp.attach`` returns it.

    run = hpcddp.attach(model, optimizer)
    for epoch in run.epochs(10):
        for inputs, targets in run.batches(loader):
            ...
            optimizer.step()
            run.step()

``attach`` loads the newest checkpoint into model and optimizer, and ``batches`` skips the samples
that were seen. ``step`` saves every ``save_every`` steps. At a stop request all ranks save the same
step and exit, and the job is requeued. Outside of a job nothing is saved and nothing stops.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hpcddp.attempt import exit_codes, lost_script
from hpcddp.errors import UserError
from hpcddp.preempt import Preemption
from hpcddp.rundir import write_json
from hpcddp.train.checkpoint.snapshot import Live, Position
from hpcddp.train.input.batches import Micro
from hpcddp.train.input.loaders import LoaderPosition, batch_size
from hpcddp.train.monitor.metrics import one_number
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.own_session import OwnSession
from hpcddp.train.parallel import state_dict
from hpcddp.train.rank import cpus
from hpcddp.train.rank.world import World
from hpcddp.train.stop import NoDetector, StopVote


class Run:
    """The run of a training loop. All ranks call its methods together.

    Args:
        live: the objects to save and load.
        clock: measures the steps.
        session: the attempt; None outside of a job.
        save_every: steps between two checkpoints; 0 saves only at a stop and at the end.
        keep: number of checkpoints to keep, the newest.
        log_every: steps between two records.
        leave: end the process after the save at a stop.
    """

    def __init__(
        self, world: World, live: Live, clock: Clock, preemption: Preemption,
        session: OwnSession | None, *, save_every: int, keep: int, log_every: int, leave: bool,
    ) -> None:  # fmt: skip
        self.world = world  #: rank, device and size of the world
        self._live, self._clock, self._session, self._preemption = live, clock, session, preemption
        self.state: dict[str, Any] = {}  #: plain data of the user, saved and loaded
        self.resumed = False  #: whether a checkpoint was loaded
        self._every, self._log_every, self._leave = save_every, log_every, leave
        self._at, self._asks, self._batch = Position(), 0, 0
        self._random: dict[str, Tensor] = {}
        self._seen: list[int] = []  # batches of the epoch since the last step
        self._reading = False  # the loop works on a batch of `batches`
        self._due = False  # a step was taken, and not handled by _look
        self._read = -1  # the epoch that `batches` read last
        self.stopped = False  #: all ranks have saved and must exit
        if session:
            self._open(session, live, keep)
        else:
            self._place = LoaderPosition(torch.initial_seed(), world.rank.world_rank)

    def _open(self, session: OwnSession, live: Live, keep: int) -> None:
        """Load the checkpoint, if there is one."""
        seed = torch.initial_seed()
        session.open(live, keep, self._hint, optimizer=True, schedule=True)
        self._at, self.resumed = session.at, session.resumed is not None  # it never goes back
        self.state = session.meta.get("own") or {}
        self._place = LoaderPosition.of(self.world, seed, session.meta, session.fixed)
        session.start(lambda: session.fixed)
        session.follow()
        if self.resumed:
            session.seed()
            self._random = state_dict.rng_tensors(self.world.rank.world_rank, self.world.device)
        session.begin(self._preemption, NoDetector(), float(os.environ.get("HPCDDP_DEADLINE") or 0))
        if self.world.is_main:
            atexit.register(session.drop)

    def _hint(self) -> str:
        """Advice if the loop waits for its data."""
        return self._place.hint(cpus.share(self.world.reports, self.world.rank.world_rank))

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._at.epoch

    @property
    def steps(self) -> int:
        """Optimizer steps taken, over all attempts."""
        return self._at.step

    def epochs(self, count: int) -> Iterator[int]:
        """The remaining epochs of ``count``; after them, the last step is saved."""
        while self._at.epoch < count:
            yield self._at.epoch
            if self.stopped:
                return
            self._at.epoch, self._at.samples_consumed = self._at.epoch + 1, 0
        self.finish()

    def at(self, epoch: int, batches: int, loader: Any, *, seen: int = 0) -> None:
        """Set the position of a loop that counts its epochs itself and may read ahead. Saves and
        stops then wait until it asks for a batch.

        Args:
            batches: batches of the epoch, on each rank, that its steps have used.
            seen: those of the current step, in a loop without ``batches``.
        """
        self._reading = True
        self._at.epoch = epoch
        self._at.samples_consumed = batches * batch_size(loader) * self.world.size
        if seen:
            self._batch, self._seen = batch_size(loader), [*range(batches - seen + 1, batches + 1)]

    def between(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The timed batches of the next step, for a loop without ``batches``; saves first."""
        _ = self._due and self._look()
        return self._clock.reading(batches)

    def used(self, loader: Any) -> int:
        """Batches of the epoch, on each rank, that were used. Batches of an attempt with another
        number of ranks count by their samples."""
        return self._at.samples_consumed // (batch_size(loader) * self.world.size)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of the epoch that the loop has not seen.

        The run saves and stops between two batches, when the loop's body has completed the step.
        ``hpcddp.Sampler`` starts after the seen samples; with another sampler the batches before
        are read and dropped. This method calls ``set_epoch``.

        Raises:
            UserError: the epoch was already read.
            SystemExit: all ranks have saved, and the process ends.
        """
        if self._read == self._at.epoch:
            raise UserError(
                f"epoch {self._read} was already read",
                where="Run.batches",
                hint="call batches once in each epoch of `for epoch in run.epochs(n)`",
            )
        if self._due and self._look():  # the loop left the epoch before after a step
            return
        self._read, size = self._at.epoch, batch_size(loader)
        each = size * self.world.size
        batches = self._place.begin(loader, self._at.epoch, self._at.samples_consumed, each)
        seeded = self._session is not None and self._session.seed()
        if self._random and not seeded:  # skipping batches has drawn numbers
            state_dict.set_rng(self._random, self.world.device)
        self._random = {}
        try:
            for batch in self._clock.reading(batches):
                self._at.samples_consumed += each
                self._seen.append(self._at.samples_consumed // each)
                self._batch, self._reading = size, True
                yield batch
                if self._due and self._look():
                    return
        finally:
            self._reading = False

    def step(self, loss: Tensor | None = None) -> bool:
        """Count an optimizer step. The run saves or stops when the loop asks for its next batch; a
        loop that does not use ``batches`` saves or stops here.

        Args:
            loss: the step's mean loss on this rank, a scalar, for the records. A step without a
                loss counts in their time and samples only.

        Returns: True if all ranks have saved and must exit (with ``leave=False``, without
            ``batches``).

        Raises:
            SystemExit: all ranks have saved, and the process ends.
            LeaseLost: a newer attempt owns the run folder.
        """
        self._at.step += 1
        self._due = True
        if self._session:
            self._session.record.took(self._at.step)
            self._log(self._session, loss)
        self._seen = []
        return False if self._reading else self._look()

    def _look(self) -> bool:
        """Save or stop if that is due; True if the loop must end."""
        self._due, session = False, self._session
        if session is None:
            return False
        session.mark(self._facts)
        session.seed()
        session.tell()  # waits for the others, so the step is marked before
        session.saver.poll()
        if session.vote.agreed(self._at.step):
            return self.stop(session.vote)
        if self._every and self._at.step % self._every == 0:
            session.saver.save(self._at, session.checked(self._facts()))
        return False

    def _log(self, session: OwnSession, loss: Tensor | None) -> None:
        """Count the step, and record it if that is due."""
        step, meter = self._at.step, session.meter
        loss = None if loss is None else loss.detach()
        samples = max(1, self._batch) * max(1, len(self._seen))
        self._clock.count(samples)
        meter.add(loss, samples)
        rate = self._live.optimizer.param_groups[0].get("lr")  # some optimizers have no rate
        meter.step(math.nan if rate is None else float(rate), None)
        micro = Micro(len(self._seen), len(self._seen))
        session.trace.add(self._seen, micro, torch.zeros(()) if loss is None else loss)
        session.trace.step(step, self._at.epoch)
        if step % self._log_every == 0 or meter.first:
            session.tell()  # of a step before, without a batch between
            session.add_up(self._at.epoch, torch.zeros((), device=self.world.device))

    def log(self, **numbers: float | Tensor) -> None:
        """Add numbers of rank 0 to the records of the run: ``run.log(accuracy=0.9)``.

        Raises:
            UserError: a value is not a number.
        """
        if self._session is None:
            return
        metrics = {name: one_number(name, value) for name, value in numbers.items()}
        self._session.record("log", step=self._at.step, epoch=self._at.epoch, metrics=metrics)

    def should_stop(self) -> bool:
        """Whether a stop is requested; ask in a long evaluation, between two steps. Then call
        ``stop``."""
        if self._session is None or self.stopped:
            return self.stopped
        self._asks += 1
        return self._session.pause.agreed(self._asks, step=self._at.step)

    def save(self) -> bool:
        """Save now and wait; whether the newest step is saved."""
        session = self._session
        return bool(session and session.saver.finish(self._at, session.checked(self._facts())))

    def stop(self, vote: StopVote | None = None) -> bool:
        """Save, record that the run must continue, and exit."""
        session = self._session
        if session is None:
            return False
        saved = self.save()
        session.end("stopped", vote or session.pause)
        if self.world.is_main and saved:
            with contextlib.suppress(OSError):  # without it, the run is requeued as after a crash
                write_json(session.attempt.left, {"code": exit_codes.STOPPED, "step": self.steps})
        self.stopped = True
        if self.world.is_main:
            lost_script.relieve(session.lease.run, session.lease.attempt)
        self.world.barrier()  # no rank exits while another one still saves
        if self._leave:
            sys.exit(exit_codes.STOPPED)
        return True

    def finish(self) -> None:
        """Save the last step. ``epochs`` calls this at its end. If the save fails, all ranks retry
        for five minutes, or until a stop request.

        Raises:
            CheckpointError: the step cannot be saved.
            SystemExit: a stop was requested, and the process ends.
        """
        session = self._session
        if session is None:
            return
        if session.saver.last(self._at, session.checked(self._facts()), self._asked):
            session.end("done")
            self.world.barrier()
        else:
            self.stop()

    def _asked(self) -> bool:
        """Whether all ranks agree to stop, now."""
        assert self._session
        self._asks += 1
        return self._session.asked(self._asks)

    def _facts(self) -> dict[str, Any]:
        """The plain data of a checkpoint, besides the state."""
        return {"best": {}, "metrics": {}, "owed": False, "first_loss": None, "own": self.state}
