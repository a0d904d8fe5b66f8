"""A person's own loop on a run: what ``hpcddp.attach`` gives it.

    run = hpcddp.attach(model, optimizer)
    for epoch in run.epochs(10):
        for inputs, targets in run.batches(loader):
            ...
            optimizer.step()
            run.step()

``attach`` puts the newest checkpoint into model and optimizer, and ``batches`` goes on behind the
samples that it had seen. ``step`` saves now and then; where the job is to stop, all ranks save the
same step and leave, and the job comes back. Outside of a job nothing is saved and nothing stops.
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
from hpcddp.train.checkpoint import snapshot
from hpcddp.train.checkpoint.snapshot import Live, Position
from hpcddp.train.input.batches import Micro
from hpcddp.train.input.loaders import LoaderPosition, batch_size
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.parallel import state_dict
from hpcddp.train.rank import cpus
from hpcddp.train.rank.world import World
from hpcddp.train.session import Session
from hpcddp.train.stop import NoDetector, StopVote


class Run:
    """A loop's hold on its run. All ranks call its methods together.

    Args:
        live: saved and restored.
        clock: counts the time of its steps.
        session: its hold on the run dir; None outside of a job.
        save_every: steps between two checkpoints; 0 saves only when it stops or ends.
        keep: newest checkpoints that are kept.
        log_every: steps between two records.
        leave: end the process when all have saved for a stop.
    """

    def __init__(
        self, world: World, live: Live, clock: Clock, preemption: Preemption,
        session: Session | None, *, save_every: int, keep: int, log_every: int, leave: bool,
    ) -> None:  # fmt: skip
        self.world, self._optimizer, self._clock = world, live.optimizer, clock
        self._session, self._preemption = session, preemption
        self.state: dict[str, Any] = {}  # plain data of the loop's own, saved and restored
        self.resumed = False
        self._at = Position()
        self._every, self._log_every, self._leave = save_every, log_every, leave
        self._asks = self._batch = 0
        self._random: dict[str, Tensor] = {}
        self._seen: list[int] = []  # batches of the epoch since the last step
        self._reading = False  # a batch of `batches` is with the loop
        self._due = False  # a step was taken, and not looked at
        self._read = -1  # the epoch that was read last
        self.stopped = False  # all ranks have saved, and are to leave
        if session:
            self._open(session, live, keep)
        self._place = LoaderPosition(torch.initial_seed(), world.rank.world_rank)

    def _open(self, session: Session, live: Live, keep: int) -> None:
        """Go on from the checkpoint, if there is one."""
        session.open(live, keep, self._hint, optimizer=True, schedule=True)
        self._at, self.resumed = session.at, session.resumed is not None  # it never goes back
        self.state = session.meta.get("own") or {}
        if self.resumed:
            rank = self.world.rank.world_rank
            self._random = state_dict.rng_tensors(rank, self.world.device)
        session.start()
        live.optimizer.register_step_pre_hook(lambda *_: session.saver.join())
        deadline = float(os.environ.get("HPCDDP_DEADLINE") or 0)
        session.begin(self._preemption, NoDetector(), deadline)
        if self.world.is_main:
            atexit.register(session.lease.drop)

    def _hint(self) -> str:
        """Advice for a loop that waits for its data."""
        return self._place.hint(cpus.share(self.world.reports, self.world.rank.world_rank))

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self._at.epoch

    @property
    def steps(self) -> int:
        """Optimizer steps taken, over all attempts."""
        return self._at.step

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of so many; the last step is saved when they are over."""
        while self._at.epoch < count:
            yield self._at.epoch
            if self.stopped:
                return
            self._at.epoch += 1
            self._at.samples_consumed = 0
        self.finish()

    def at(self, epoch: int, batches: int, loader: Any) -> None:
        """Say where a loop is that takes its epochs from elsewhere, and may read ahead. Its next
        step is looked at when it asks for a batch, and never at once.

        Args:
            batches: of the epoch, on each rank, that its steps have used.
        """
        self._reading = True
        self._at.epoch = epoch
        self._at.samples_consumed = batches * batch_size(loader) * self.world.size

    def used(self, loader: Any) -> int:
        """Batches of the epoch, on each rank, that were used; those of other numbers of ranks
        count by their samples."""
        return self._at.samples_consumed // (batch_size(loader) * self.world.size)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The epoch's batches that the loop has not seen.

        Between two of them is where the run saves and stops, when the loop's body has done all
        that belongs to a step. A ``hpcddp.Sampler`` begins behind the seen samples; with
        another one the batches before that are read and dropped. ``set_epoch`` is called here.

        Raises:
            UserError: the epoch was read already.
            SystemExit: all ranks have saved, and leave.
        """
        if self._read == self._at.epoch:
            raise UserError(
                f"epoch {self._read} was read already",
                where="Run.batches",
                hint="take it once in each epoch of `for epoch in run.epochs(n)`",
            )
        if self._due and self._look():  # a loop that did not ask for a batch after its last one
            return
        self._read, size = self._at.epoch, batch_size(loader)
        each = size * self.world.size
        batches = self._place.begin(loader, self._at.epoch, self._at.samples_consumed, each)
        if self._random:  # whatever was drawn on the way here was drawn before
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
        """An optimizer step was taken. It is looked at when the loop asks for its next batch, or
        at once where it does not take them from ``batches``.

        Args:
            loss: the step's mean loss on this rank, for the records; steps without one count in
                their time and samples.

        Returns: True if all ranks have saved and are to leave (with ``leave=False``, and looked at
            at once).

        Raises:
            SystemExit: they have saved, and leave.
            LeaseLost: a newer attempt owns the run dir.
        """
        self._at.step += 1
        if self._session is None:
            self._seen.clear()
            return False
        self._session.record.took(self._at.step)
        self._log(self._session, loss)
        self._due = True
        return False if self._reading else self._look()

    def _look(self) -> bool:
        """Save and stop where that is due; True when the loop is to end."""
        self._due, session = False, self._session
        assert session
        session.saver.poll()
        if session.vote.agreed(self._at.step):
            return self.stop(session.vote)
        if self._every and self._at.step % self._every == 0:
            session.saver.save(self._at, self._facts())
        return False

    def _log(self, session: Session, loss: Tensor | None) -> None:
        """Count the step, and record it where that is due."""
        step, meter = self._at.step, session.meter
        loss = None if loss is None else loss.detach()
        samples = max(1, self._batch) * max(1, len(self._seen))
        self._clock.count(samples)
        meter.add(loss, samples)
        rate = self._optimizer.param_groups[0].get("lr")  # there are optimizers without one
        meter.step(math.nan if rate is None else float(rate), None)
        micro = Micro(len(self._seen), len(self._seen))
        session.trace.add(self._seen, micro, torch.zeros(()) if loss is None else loss)
        session.trace.step(step, self._at.epoch)
        self._seen = []
        if step % self._log_every == 0 or meter.first:
            session.add_up(self._at.epoch, torch.zeros((), device=self.world.device))
            session.tell()

    def log(self, **numbers: float | Tensor) -> None:
        """Put rank 0's numbers into the records of the run: ``run.log(accuracy=0.9)``.

        Raises:
            UserError: one of them is no number.
        """
        if self._session is None:
            return
        for name, value in numbers.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise UserError(
                    f"{name} is a {type(value).__name__}, and not one number", where="Run.log"
                ) from None
        self._session.record("log", step=self._at.step, epoch=self._at.epoch, metrics=numbers)

    def should_stop(self) -> bool:
        """Whether all ranks are to stop, between two steps: in a long evaluation, say. ``stop``
        does it then."""
        if self._session is None or self.stopped:
            return self.stopped
        self._asks += 1
        return self._session.pause.agreed(self._asks, step=self._at.step)

    def save(self) -> bool:
        """Save now, and wait for it; whether the newest step is saved."""
        return self._session is not None and self._session.saver.finish(self._at, self._facts())

    def stop(self, vote: StopVote | None = None) -> bool:
        """Save, say that the run is to go on, and leave."""
        session = self._session
        if session is None:
            return False
        saved = self.save()
        session.end("stopped", vote or session.pause)
        if self.world.is_main and saved:
            with contextlib.suppress(OSError):  # without it, the run comes back as after a crash
                write_json(session.attempt.left, {"code": exit_codes.STOPPED, "step": self.steps})
        self.stopped = True
        if self.world.is_main:
            lost_script.relieve(session.lease.run, session.lease.attempt)
        self.world.barrier()  # no rank leaves while another one still saves
        if self._leave:
            sys.exit(exit_codes.STOPPED)
        return True

    def finish(self) -> None:
        """Save the last step. ``epochs`` calls it at its end. While there is no room for it, all
        ranks try again for five minutes, and may be asked to stop.

        Raises:
            CheckpointError: it cannot be saved.
            SystemExit: they were asked to stop, and leave.
        """
        session = self._session
        if session is None:
            return
        if not session.saver.last(self._at, self._facts(), self._asked):
            self.stop()
            return
        session.end("done")
        self.world.barrier()

    def _asked(self) -> bool:
        """Whether all ranks agree to stop, now."""
        assert self._session
        self._asks += 1
        return self._session.asked(self._asks)

    def _facts(self) -> dict[str, Any]:
        """The facts of a checkpoint, beside the state."""
        snapshot.require_plain(self.state)
        return {"best": {}, "metrics": {}, "owed": False, "first_loss": None, "own": self.state}
