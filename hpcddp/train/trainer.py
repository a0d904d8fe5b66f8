"""Step 9: the training loop, in the names of the PyTorch DDP tutorials."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcddp.preempt import Preemption
from hpcddp.spec import JobSpec
from hpcddp.train import micro_batch_search
from hpcddp.train.checkpoint import checkpoint, newest, snapshot
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.saver import Saver
from hpcddp.train.checkpoint.snapshot import Position
from hpcddp.train.divergence import DivergenceDetector, Finding, RollBack
from hpcddp.train.evaluate import Evaluations
from hpcddp.train.input import loading
from hpcddp.train.input.batches import Micro, Step, TrainData
from hpcddp.train.meter import Meter
from hpcddp.train.monitor.heartbeat import Pulse
from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.monitor.slow_ranks import SlowRanks
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.parallel.hooks import Hook
from hpcddp.train.rank import spread
from hpcddp.train.rank.task_module import Task
from hpcddp.train.rank.world import World
from hpcddp.train.setup import Model
from hpcddp.train.stop import StopVote
from hpcddp.train.trace import Trace

LEAD = 5.0  # seconds between the end of the last save and the time limit


class Trainer:
    """One rank's training in one attempt."""

    def __init__(
        self,
        lease: Lease,
        spec: JobSpec,
        task: Task,
        world: World,
        record: Recorder,
        pulse: Pulse,
    ) -> None:
        spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data))  # of this rank
        self.run, self.lease, self.spec = lease.run, lease, spec
        self.task, self.world, self.record, self.pulse = task, world, record, pulse
        self.at = Position()
        self._fit: dict[str, Any] = {}  # what fits into memory
        self.spread = spread.of(spec, world)
        self.evaluations = Evaluations(task, spec, self.spread, pulse, record)
        self._retry = DiskRetry(world, pulse.touch)
        self.resumed = newest.find(self.run, self._retry)
        made = Model(task, spec, self.spread, new=self.resumed is None)
        self.module = made.module
        self._clock = Clock(world.device, whole=spec.metrics.ranks)
        self.data = TrainData(task.dataset("train"), spec, self.spread, self._clock)
        self._meter = Meter(world, self._clock)
        self.detector = DivergenceDetector(self.spread, spec.train, self.module, self._meter)
        self.hook = Hook(spec, self.spread)
        meta = self._meta(self.resumed) if self.resumed else {}
        self._load(made, self.resumed, meta)
        self.cpus, self._look = loading.settle(meta.get("look"), spec, world, self.data)
        spec.data.workers = self.cpus.workers
        self.data.load(self.cpus.workers)
        if spec.train.find_micro_batch:
            with pulse.patience():
                self._fit = micro_batch_search.settle(
                    self._fit, task, spec, self.spread, self.data, self.live, record
                )
        self.engine = made.engine(self.data, self.hook)
        if not self.spread.layout.threads:
            self._clock.watch(made.chains or [made.module])
        stages = [self.spread.layout.place(rank).pp for rank in range(world.size)]
        self._slow_ranks = SlowRanks(record, world.hosts, stages, spec.metrics.slow, self._hint)
        if spec.train.measure:
            self._meter.measure(self.live)
        trace = self.run.attempt(lease.attempt).trace(world.rank.world_rank)
        self._trace = Trace(trace if spec.train.trace else None)
        self._untold: tuple[int, int] | None = None  # step and epoch of a record on its way

    def _hint(self) -> str:
        """What to change where the training waits for its data."""
        far = loading.is_far(self.data.dataset, again=self.at.epoch > self._began_in)
        return loading.hint(self.cpus.workers, self.cpus.cpus, far=far)

    def _load(self, made: Model, folder: Path | None, meta: dict[str, Any]) -> None:
        """Make optimizer and schedule, and put a checkpoint into them, if there is one."""
        if folder:
            self.at = snapshot.position(meta, folder)
            self._fit = meta.get("fit") or {}
            self.evaluations.go_on(meta)
            self.detector.refer_to(meta.get("first_loss"))
        self._began_in = self.at.epoch + bool(self.at.samples_consumed)  # the first one whole
        self.total_steps = _total_steps(self.spec, self.at, self.data)
        self.live = made.live(self.hook, self.total_steps)
        if folder:
            self._restore(folder, meta)
        facts = self.spec.checkpoint.keep, self.at.step if folder else None, self._retry
        self.saver = Saver(self.lease, self.spread, self.live, self.record, *facts)

    def _meta(self, folder: Path) -> dict[str, Any]:
        return self._retry.read(lambda: checkpoint.read_meta(folder))

    def _restore(self, folder: Path, meta: dict[str, Any]) -> None:
        own = {"optimizer": self.task.has("optimizer"), "schedule": self.task.has("scheduler")}
        snapshot.restore(folder, meta, self.spread, self.live, self._retry, **own)

    def train(self, preemption: Preemption, deadline: float = 0.0) -> str:
        """Train to the end, or until all ranks agree to stop: "done" or "stopped".

        Args:
            deadline: end of the time limit, in seconds since the epoch; 0 for none.
        """
        self.record(
            "start",
            step=self.at.step,
            epoch=self.at.epoch,
            total_steps=self.total_steps,
            steps_per_epoch=self.data.steps_left(0),
            micro_batch=self.data.micro_batch,
            accumulation=self.data.accumulation,
            global_batch=self.spec.global_batch,
            strategy=str(self.spread.layout),
            resumed=str(self.resumed.relative_to(self.run.path)) if self.resumed else None,
            seed=self.spec.seed,
            **self.cpus._asdict(),
        )
        while True:
            try:
                return self._train(preemption, deadline)
            except RollBack as answer:
                self._roll_back(answer.found)

    def _train(self, preemption: Preemption, deadline: float) -> str:
        self._preemption = preemption
        facts = (self.world, preemption, self.run.request, self.lease, self.detector)
        vote = StopVote(*facts, deadline, self._lead)
        self._pause = StopVote(*facts, deadline, self._lead)
        if self.evaluations.owed:
            self._evaluate()
        stopped = self.evaluations.owed
        while not stopped and self.at.step < self.total_steps:
            stopped = self._run_epoch(vote)
        if not stopped and self.evaluations.newest is None:  # resumed at the end
            self._evaluate()
            stopped = self.evaluations.owed
        if not stopped:
            return self._end("done")
        return self._end("stopped", self._pause if self.evaluations.owed else vote)

    def _lead(self) -> float:
        """Seconds before the time limit at which to begin to save."""
        return LEAD + 2 * self.saver.took

    def _roll_back(self, found: Finding) -> None:
        """Go back to the newest checkpoint, in all ranks; Diverged when that cannot help."""
        with self.pulse.patience():
            self.saver.wait()
            folder = self.detector.go_back(found, newest.find(self.run, self._retry))
            meta = self._meta(folder)
            self.at = snapshot.position(meta, folder)
            self.evaluations.go_on({**meta, "owed": False})  # this life has made up for it
            self._restore(folder, meta)
            self.saver.begin_from(self.at.step)
        self._untold = None
        self._meter.reset()
        name = str(folder.relative_to(self.run.path))
        self.record("rollback", **found.facts(), to=self.at.step, path=name)

    def _run_epoch(self, vote: StopVote) -> bool:
        """Train to the end of the epoch, or of the training; True when all agreed to stop."""
        epoch = self.at.epoch
        batches = self.data.batches(epoch, self.at.samples_consumed)
        while self.at.epoch == epoch and self.at.step < self.total_steps:
            self._run_batch(batches)
            evaluated = self._after_step(epoch, vote)
            if self.evaluations.owed:
                return True
            if self.at.step < self.total_steps and vote.agreed(self.at.step, now=evaluated):
                return True
        return False

    def _run_batch(self, batches: Iterator[tuple[list[int], Any]]) -> None:
        """One optimizer step, on this rank's share of a global batch."""
        step = self.data.step_at(self.at.samples_consumed)
        self.detector.begin(self.at.step + 1)
        self.hook.begin(self.at.step)
        self._clock.count(sum(micro.real for micro in step.micros))
        self.engine.run(batches, step, self.live.scaler, self._seen)
        self._update()
        self._trace.step(self.at.step + 1, self.at.epoch)
        self._advance(step)
        self.hook.end(self.at.step, self.module)
        self.pulse.beat(self.at.step)

    def _seen(self, ids: list[int], micro: Micro, loss: Tensor) -> None:
        """A micro-batch went forward and backward."""
        self._meter.add(loss, micro.real)
        self.detector.add(loss, self.at.step + 1)
        self._trace.add(ids, micro, loss)

    def _update(self) -> None:
        """Change the weights by the gradients."""
        live, norm = self.live, None
        with self._meter.paused():
            self.saver.join()
        found = self.detector.leaves_out(self.at.step + 1, scaled=live.scaler.is_enabled())
        if found:
            self._leave_out(found)
            return
        if self.spec.train.clip_norm or not self.spread.layout.plain:
            live.scaler.unscale_(live.optimizer)
        if self.spec.train.clip_norm:
            norm = self.spread.clip(self.module, self.spec.train.clip_norm)
        live.scaler.step(live.optimizer)
        live.scaler.update()
        self._meter.step(float(live.optimizer.param_groups[0]["lr"]), norm)
        live.optimizer.zero_grad(set_to_none=True)
        live.scheduler.step()

    def _leave_out(self, found: Finding) -> None:
        """The weights stay; the schedule and the position follow from the number of steps."""
        self.live.optimizer.zero_grad(set_to_none=True)
        self.live.scheduler.step()
        self.hook.forget()
        self.record("skipped", epoch=self.at.epoch, **found.facts())

    def _advance(self, step: Step) -> None:
        self.evaluations.newest = None
        self.at.step += 1
        self.record.took(self.at.step)
        self.at.samples_consumed += step.samples
        if self.data.steps_left(self.at.samples_consumed) == 0:
            self.at.epoch += 1
            self.at.samples_consumed = 0

    def _after_step(self, epoch: int, vote: StopVote) -> bool:
        """Log, evaluate and save, where they are due; True when it evaluated."""
        self.saver.poll()
        self._tell()
        step, end = self.at.step, self.at.step == self.total_steps
        if step % self.spec.train.log_every == 0 or end or self._meter.first:
            self._meter.add_up(self.detector.flag())
            self._untold = step, epoch
        ended, each = self.at.epoch > epoch, self.spec.train.eval_every
        due = end or (ended and each > 0 and self.at.epoch % each == 0)
        if due or not vote.quick:
            self._tell()
        improved = self._evaluate() if due else False
        every = self.spec.checkpoint.every
        if every and (step % every == 0 or improved) and not self.evaluations.owed:
            self._save()
        return due

    def _tell(self) -> None:
        """Write the record that is on its way, if one is."""
        if self._untold is None:
            return
        (step, epoch), self._untold = self._untold, None
        values, bad = self._meter.read()
        self.detector.settle(step, bad)
        if values:  # else all steps were left out
            self.detector.refer_to(values["loss"])
            self.record("train", step=step, epoch=epoch, **values)
        self._slow_ranks.look(step, values, self._meter.ranks)

    def _evaluate(self) -> bool:
        """Evaluate, if there is anything to do it on; True when it is the best so far."""
        with self._meter.paused():
            how = self._preemption, self._pause, self._level
            return self.evaluations.run(self.engine, self.at, *how)

    def _level(self) -> None:
        """All ranks have the same weights and buffers."""
        self.hook.level(self.module, self.live.optimizer)
        self.engine.share_buffers()

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint says of this step, beside the state."""
        return {
            "global_batch": self.spec.global_batch,
            "seed": self.spec.seed,
            "schedule": self.spec.train.schedule,
            "total_steps": self.total_steps,
            **self.evaluations.facts(),
            "fit": self._fit,
            "look": self._look,
            "first_loss": self.detector.first_loss,
        }

    def _save(self) -> None:
        """Begin to save this step, unless it is saved or its numbers are bad; a collective."""
        began = time.monotonic()
        if self.saver.saved != self.at.step:
            self.hook.level(self.module, self.live.optimizer)
            self.detector.check(self.at.step)
        looked = time.monotonic() - began
        with self._meter.paused(), self.pulse.patience():
            self.saver.save(self.at, self._facts(), looked)

    def _end(self, outcome: str, vote: StopVote | None = None) -> str:
        """Save, and say how it ended. A training that cannot be saved is not done.

        Raises:
            CheckpointError: it cannot.
        """
        self._tell()
        self._save()
        with self.pulse.patience():
            if outcome == "stopped":
                self.saver.finish(self.at, self._facts())
            elif not self.saver.last(self.at, self._facts(), self._asked):
                return self._end("stopped", self._pause)
        last = self.evaluations.newest
        result = vars(last) if outcome == "done" and last else {}
        facts: dict[str, Any] = {
            "step": self.at.step,
            "saved": self.saver.saved,
            "seed": self.spec.seed,
        }
        if vote:
            facts["by"], facts["asked"] = vote.told()
        self.record("end", outcome=outcome, **facts, **result)
        return outcome

    def _asked(self) -> bool:
        """Whether all ranks agree to stop, at the training's end."""
        return self._pause.agreed(self.at.step, now=True)

    def close(self) -> None:
        """Let a running save end; drop the DDP wrapper: after the process group its destructor
        can wait for ever."""
        self.saver.close()
        self.engine.close()
        self._trace.close()
        self.data.close()
        self.evaluations.close()


def _total_steps(spec: JobSpec, at: Position, data: TrainData) -> int:
    """The step at which the training ends, counted on from where it is."""
    limits = [spec.max_steps] if spec.max_steps else []
    epochs = spec.epochs or (0 if limits else 1)
    if epochs:
        limits.append(at.step + data.steps_to(epochs, at.epoch, at.samples_consumed))
    return min(limits)
