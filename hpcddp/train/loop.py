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
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcddp import record as records
from hpcddp.attempt import exit_codes, lost_script
from hpcddp.errors import UserError
from hpcddp.preempt import Preemption, ignore_stop_signals
from hpcddp.rundir import RunDir, write_json
from hpcddp.train.checkpoint import checkpoint, newest, snapshot
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.saver import Saver
from hpcddp.train.checkpoint.snapshot import Live, Position
from hpcddp.train.input import loading
from hpcddp.train.input.batches import Micro
from hpcddp.train.input.loaders import LoaderPosition, batch_size, begin
from hpcddp.train.meter import Meter
from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.monitor.slow_ranks import SlowRanks
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.parallel import state_dict
from hpcddp.train.rank import cpus
from hpcddp.train.rank.spread import replicas
from hpcddp.train.rank.world import World
from hpcddp.train.stop import StopVote
from hpcddp.train.trace import Trace

LEAD = 5.0  # seconds between the end of the last save and the time limit


class _NoDetector:
    """A loop's numbers are its own."""

    def bad(self) -> bool:
        return False

    def settle(self, step: int, bad: bool) -> None:
        pass


class Run:
    """A loop's hold on its run. Methods are called by all ranks together.

    Args:
        live: what is saved.
        folder: the run dir; None outside of a job.
        save_every: steps between two checkpoints; 0 saves only when it stops or ends.
        keep: newest checkpoints that are kept.
        log_every: steps between two records.
        leave: end the process when all have saved for a stop.
        compiled: torch.compile is around the model.
    """

    def __init__(
        self, world: World, live: Live, folder: Path | None, *,
        save_every: int, keep: int, log_every: int, leave: bool, compiled: bool = False,
    ) -> None:  # fmt: skip
        self.world, self._optimizer = world, live.optimizer
        spec = records.read(RunDir(folder)).spec if folder else {}
        self._spec: dict[str, dict[str, Any]] = {n: spec.get(n, {}) for n in ("train", "metrics")}
        self._clock = Clock(world.device, whole=self._spec["metrics"].get("ranks", True))
        if folder and not compiled:  # what is compiled has no place for a clock
            self._clock.watch([live.module])
        self._workers = self._reads = 0  # of the loader that was read last; how often one was
        self._dataset: Any = None
        self.state: dict[str, Any] = {}  # plain data of the loop's own, saved and restored
        self.resumed = False
        self._at = Position()
        self._every, self._log_every, self._leave = save_every, log_every, leave
        self._meter = Meter(world, self._clock)
        self._asks = self._batch = 0
        self._random: dict[str, Tensor] = {}
        self._seen: list[int] = []  # batches of the epoch since the last step
        self._reading = False  # a batch of `batches` is with the loop
        self._due = False  # a step was taken, and not looked at
        self._read = -1  # the epoch that was read last
        self.stopped = False  # all ranks have saved, and are to leave
        self._folder = RunDir(folder) if folder else None
        if self._folder:
            self._open(self._folder, live, keep)
        self._place = LoaderPosition(torch.initial_seed(), world.rank.world_rank)

    def _open(self, folder: RunDir, live: Live, keep: int) -> None:
        """Take the run dir over, and go on from its newest checkpoint."""
        attempt = int(os.environ.get("HPCDDP_ATTEMPT", "1"))
        self._lease = Lease(folder, attempt)
        self._mine = folder.attempt(attempt)
        self._record = Recorder(self._mine, active=self.world.is_main, lease=self._lease)
        self._lease.take(self.world)
        self._preemption = Preemption()
        self._preemption.install()
        atexit.register(
            ignore_stop_signals
        )  # Python takes the handlers away, and one may come late
        self._record("ranks", backend=self.world.backend, ranks=self.world.reports)
        stages, slow = [0] * self.world.size, self._spec["metrics"].get("slow", 1.5)
        self._slow_ranks = SlowRanks(self._record, self.world.hosts, stages, slow, self._hint)
        retry, ranks = DiskRetry(self.world), replicas(self.world)
        saved = newest.find(folder, retry)
        if saved:
            meta = retry.read(lambda: checkpoint.read_meta(saved))
            self._at, self.resumed = snapshot.position(meta, saved), True
            self.state = meta.get("own") or {}
            snapshot.restore(saved, meta, ranks, live, retry, optimizer=True, schedule=True)
            self._random = state_dict.rng_tensors(self.world.rank.world_rank, self.world.device)
        path = str(saved.relative_to(folder.path)) if saved else None
        self._record("start", step=self._at.step, epoch=self._at.epoch, resumed=path)
        step = self._at.step if saved else None
        self._saver = Saver(self._lease, ranks, live, self._record, keep, step, retry)
        live.optimizer.register_step_pre_hook(lambda *_: self._saver.join())
        deadline = float(os.environ.get("HPCDDP_DEADLINE") or 0)
        facts = (self.world, self._preemption, folder.request, self._lease, _NoDetector())
        self._vote = StopVote(*facts, deadline, self._lead)
        self._pause = StopVote(*facts, deadline, self._lead)
        trace = self._mine.trace(self.world.rank.world_rank)
        self._trace = Trace(trace if self._spec["train"].get("trace") else None)
        if self.world.is_main:
            atexit.register(self._lease.drop)

    def _hint(self) -> str:
        """What to change where the loop waits for its data."""
        count = cpus.share(self.world.reports, self.world.rank.world_rank)
        far = loading.is_far(self._dataset, again=self._reads > 1)
        return loading.hint(self._workers, count, key="num_workers", far=far)

    def _lead(self) -> float:
        """Seconds before the time limit at which to begin to save."""
        return LEAD + 2 * self._saver.took

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
        that belongs to a step. A ``hpcddp.Sampler`` begins where it is told; with another one the
        batches before that are read and dropped. ``set_epoch`` is called here.

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
        skip = self._place.go_to(loader, self._at.epoch, self._at.samples_consumed, each)
        batches = begin(loader)
        self._workers, self._reads = getattr(loader, "num_workers", 0), self._reads + 1
        self._dataset = getattr(loader, "dataset", None)
        for _ in range(skip):
            next(batches, None)
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
        if self._folder is None:
            self._seen.clear()
            return False
        self._record.took(self._at.step)
        self._log(loss)
        self._due = True
        return False if self._reading else self._look()

    def _look(self) -> bool:
        """Save and stop where that is due; True when the loop is to end."""
        self._due = False
        self._saver.poll()
        if self._vote.agreed(self._at.step):
            return self.stop(self._vote)
        if self._every and self._at.step % self._every == 0:
            self._saver.save(self._at, self._facts())
        return False

    def _log(self, loss: Tensor | None) -> None:
        step, epoch = self._at.step, self._at.epoch
        loss = None if loss is None else loss.detach()
        samples = max(1, self._batch) * max(1, len(self._seen))
        self._clock.count(samples)
        self._meter.add(loss, samples)
        rate = self._optimizer.param_groups[0].get("lr")  # there are optimizers without one
        self._meter.step(math.nan if rate is None else float(rate), None)
        one = Micro(len(self._seen), len(self._seen))
        self._trace.add(self._seen, one, torch.zeros(()) if loss is None else loss)
        self._trace.step(step, epoch)
        self._seen = []
        if step % self._log_every and not self._meter.first:
            return
        self._meter.add_up(torch.zeros((), device=self.world.device))
        values, _ = self._meter.read()
        self._record("train" if "loss" in values else "step", step=step, epoch=epoch, **values)
        self._slow_ranks.look(step, values, self._meter.ranks)

    def log(self, **numbers: float | Tensor) -> None:
        """Put rank 0's numbers into the records of the run: ``run.log(accuracy=0.9)``.

        Raises:
            UserError: one of them is no number.
        """
        if self._folder is None:
            return
        for name, value in numbers.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise UserError(
                    f"{name} is a {type(value).__name__}, and not one number", where="Run.log"
                ) from None
        self._record("log", step=self._at.step, epoch=self._at.epoch, metrics=numbers)

    def should_stop(self) -> bool:
        """Whether all ranks are to stop, between two steps: in a long evaluation, say. ``stop``
        does it then."""
        if self._folder is None or self.stopped:
            return self.stopped
        self._asks += 1
        return self._pause.agreed(self._asks, step=self._at.step)

    def save(self) -> bool:
        """Save now, and wait for it; whether the newest step is saved."""
        return self._folder is not None and self._saver.finish(self._at, self._facts())

    def stop(self, vote: StopVote | None = None) -> bool:
        """Save, say that the run is to go on, and leave."""
        if self._folder is None:
            return False
        saved = self.save()
        by, asked = (vote or self._pause).told()
        facts = {"step": self._at.step, "saved": self._saver.saved, "by": by, "asked": asked}
        self._record("end", outcome="stopped", **facts)
        if self.world.is_main and saved:
            with contextlib.suppress(OSError):  # without it, the run comes back as after a crash
                write_json(self._mine.left, {"code": exit_codes.STOPPED, "step": self._at.step})
        self.stopped = True
        if self.world.is_main:
            lost_script.relieve(self._folder, self._mine.number)
        self.world.barrier()  # nobody leaves while another one still saves
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
        if self._folder is None:
            return
        if not self._saver.last(self._at, self._facts(), self._asked):
            self.stop()
            return
        self._record("end", outcome="done", step=self._at.step, saved=self._saver.saved)
        self.world.barrier()

    def _asked(self) -> bool:
        """Whether all ranks agree to stop, now."""
        self._asks += 1
        return self._pause.agreed(self._asks, step=self._at.step, now=True)

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint says beside the state."""
        for name, value in self.state.items():
            try:
                json.dumps({name: value}, allow_nan=True)
            except TypeError:
                raise UserError(
                    f"run.state[{name!r}] is a {type(value).__name__}, and not plain data",
                    where="Run.state",
                    hint="put numbers, texts, lists and dictionaries there: tensor.item()",
                ) from None
        return {"best": {}, "metrics": {}, "owed": False, "first_loss": None, "own": self.state}
