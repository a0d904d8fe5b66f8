"""Step 9: the training loop, in the names of the PyTorch DDP tutorials."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hpcddp.preempt import Preemption
from hpcddp.spec import JobSpec
from hpcddp.train import micro_batch_search
from hpcddp.train.checkpoint import newest
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.snapshot import Position
from hpcddp.train.divergence import DivergenceDetector, Finding, RollBack
from hpcddp.train.evaluate import Evaluations
from hpcddp.train.input import loading, seeding
from hpcddp.train.input.batches import Micro, Step, TrainData
from hpcddp.train.meter import Meter
from hpcddp.train.monitor.heartbeat import Heartbeat
from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.parallel.hooks import Hook
from hpcddp.train.rank import spread
from hpcddp.train.rank.task_module import Task
from hpcddp.train.rank.world import World
from hpcddp.train.session import Session
from hpcddp.train.setup import Model
from hpcddp.train.stop import StopVote


class Trainer:
    """One rank's training in one attempt."""

    def __init__(
        self, lease: Lease, spec: JobSpec, task: Task, world: World, record: Recorder,
        heartbeat: Heartbeat,
    ) -> None:  # fmt: skip
        spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data))  # of this rank
        self.lease, self.spec, self.task = lease, spec, task
        self.world, self.record, self.heartbeat = world, record, heartbeat
        self.spread = spread.of(spec, world)
        self.evaluations = Evaluations(task, spec, self.spread, heartbeat, record)
        retry = DiskRetry(world, heartbeat.touch)
        saved = newest.find(lease.run, retry)
        model = Model(task, spec, self.spread, new=saved is None)
        self.module = model.module
        self._clock = Clock(world.device, whole=spec.metrics.ranks)
        self.data = TrainData(task.dataset("train"), spec, self.spread, self._clock)
        self._meter = Meter(world, self._clock)
        self.detector = DivergenceDetector(self.spread, spec.train, self.module, self._meter)
        self.hook = Hook(spec, self.spread)
        self.session = Session(
            lease, self.spread, record, self._meter, retry, saved,
            slot=heartbeat.slot, slow=spec.metrics.slow, trace=spec.train.trace,
        )  # fmt: skip
        self._open(model)
        self._fit_to_node()
        self.engine = model.engine(self.data, self.hook)
        if not self.spread.layout.threads:
            self._clock.watch(model.chains or [model.module])
        if spec.train.measure:
            self._meter.measure(self.live)

    @property
    def at(self) -> Position:
        """The position of the training."""
        return self.session.at

    def _hint(self) -> str:
        """Advice if the training waits for its data."""
        far = loading.is_far(self.data.dataset, again=self.at.epoch > self._first_epoch)
        return loading.hint(self.cpus.workers, self.cpus.cpus, far=far)

    def _open(self, model: Model) -> None:
        """Make optimizer and schedule, and load the checkpoint, if there is one."""
        meta, spec = self.session.meta, self.spec
        if self.session.resumed:
            self.evaluations.go_on(meta)
            self.detector.refer_to(meta.get("first_loss"))
        self._first_epoch = self.at.epoch + bool(self.at.samples_consumed)  # read from its start
        self.total_steps = self.data.total_steps(spec, **vars(self.at))
        self.live = model.live(self.hook, self.total_steps)
        own = {"optimizer": self.task.has("optimizer"), "schedule": self.task.has("scheduler")}
        self.session.open(self.live, spec.checkpoint.keep, self._hint, **own)

    def _fit_to_node(self) -> None:
        """Divide the CPUs and find the micro-batch, or read both from the checkpoint."""
        meta, spec = self.session.meta, self.spec
        self.cpus, self._look = loading.settle(meta.get("look"), spec, self.world, self.data)
        spec.data.workers = self.cpus.workers
        self.data.load(self.cpus.workers)
        self._fit: dict[str, Any] = meta.get("fit") or {}  # the micro-batch that fits in memory
        if spec.train.find_micro_batch:
            with self.heartbeat.patience():
                how = spec, self.spread, self.data, self.live, self.record
                self._fit = micro_batch_search.settle(self._fit, self.task, *how)

    def train(self, preemption: Preemption, deadline: float = 0.0) -> str:
        """Train to the end, or until all ranks agree to stop: "done" or "stopped".

        Args:
            deadline: end of the time limit, in seconds since the epoch; 0 for none.
        """
        self.session.start(
            self._facts, total_steps=self.total_steps, steps_per_epoch=self.data.steps_left(0),
            micro_batch=self.data.micro_batch, accumulation=self.data.accumulation,
            global_batch=self.spec.global_batch, strategy=str(self.spread.layout),
            seed=self.spec.seed, **self.cpus._asdict(),
        )  # fmt: skip
        while True:
            try:
                with self.session.failing():
                    return self._train(preemption, deadline)
            except RollBack as answer:
                with self.session.failing():
                    self._roll_back(answer.finding)

    def _train(self, preemption: Preemption, deadline: float) -> str:
        self._preemption = preemption
        self.session.begin(preemption, self.detector, deadline)
        if self.evaluations.owed:
            self._evaluate()
        stopped = self.evaluations.owed
        while not stopped and self.at.step < self.total_steps:
            stopped = self._run_epoch()
        if not stopped and self.evaluations.newest is None:  # resumed at the end
            self._evaluate()
            stopped = self.evaluations.owed
        if not stopped:
            return self._end()
        return self._end(self.session.pause if self.evaluations.owed else self.session.vote)

    def _roll_back(self, finding: Finding) -> None:
        """Go back to the newest checkpoint, on all ranks; Diverged if that is not possible."""
        session, run = self.session, self.lease.run
        with self.heartbeat.patience():
            session.saver.wait()
            folder = self.detector.go_back(finding, newest.find(run, session.retry))
            session.go_back(folder)
            self.evaluations.go_on({**session.meta, "owed": False})  # this attempt has made it up
        path = str(folder.relative_to(run.path))
        self.record("rollback", **finding.facts(), to=self.at.step, path=path)

    def _run_epoch(self) -> bool:
        """Train to the end of the epoch or of the training; True if all ranks agreed to stop."""
        epoch = self.at.epoch
        batches = self.data.batches(epoch, self.at.samples_consumed)
        while self.at.epoch == epoch and self.at.step < self.total_steps:
            self._run_batch(batches)
            evaluated = self._after_step(epoch)
            if self.evaluations.owed:
                return True
            going_on = self.at.step < self.total_steps
            if going_on and self.session.vote.agreed(self.at.step, now=evaluated):
                return True
        return False

    def _run_batch(self, batches: Iterator[tuple[list[int], Any]]) -> None:
        """One optimizer step, on this rank's share of a global batch."""
        step = self.data.step_at(self.at.samples_consumed)
        seeding.seed_step(self.spec.seed, self.spread.stream, self.at.step, self.world.device)
        self.detector.begin(self.at.step + 1)
        self.hook.begin(self.at.step)
        self._clock.count(sum(micro.real for micro in step.micros))
        self.engine.run(batches, step, self.live.scaler, self._seen)
        self.session.trace.step(self.at.step + 1, self.at.epoch)
        # Behind the trace: a rank killed here has its line.
        self.session.rescue.tie(self.engine.share_buffers, tied=self.spec.train.clip_norm > 0)
        self._update()
        self._advance(step)
        self.hook.end(self.at.step, self.module)
        self.session.rescue.mark(self.at)
        self.heartbeat.beat(self.at.step)

    def _seen(self, ids: list[int], micro: Micro, loss: Tensor) -> None:
        """Count a micro-batch after its forward and backward pass."""
        self._meter.add(loss, micro.real)
        self.detector.add(loss, self.at.step + 1)
        self.session.trace.add(ids, micro, loss)

    def _update(self) -> None:
        """Update the weights from the gradients."""
        live, norm = self.live, None
        with self._meter.paused():
            self.session.saver.join()
        scaled = live.scaler.is_enabled()
        if finding := self.detector.leaves_out(self.at.step + 1, scaled=scaled):
            self._leave_out(finding)
            return
        if self.spec.train.clip_norm or not self.spread.layout.plain:
            live.scaler.unscale_(live.optimizer)
        if self.spec.train.clip_norm:
            norm = self.spread.clip(self.module, self.spec.train.clip_norm)
        self.session.rescue.change()
        live.scaler.step(live.optimizer)
        live.scaler.update()
        self._meter.step(float(live.optimizer.param_groups[0]["lr"]), norm)
        live.optimizer.zero_grad(set_to_none=True)
        live.scheduler.step()

    def _leave_out(self, finding: Finding) -> None:
        """Skip the update; schedule and position advance, as they follow from the step number."""
        self.session.rescue.change()
        self.live.optimizer.zero_grad(set_to_none=True)
        self.live.scheduler.step()
        self.hook.forget()
        self.record("skipped", epoch=self.at.epoch, **finding.facts())

    def _advance(self, step: Step) -> None:
        self.at.step += 1
        self.record.took(self.at.step)
        self.at.samples_consumed += step.samples
        if ended := self.data.steps_left(self.at.samples_consumed) == 0:
            self.at.epoch += 1
            self.at.samples_consumed = 0
        self.evaluations.step(self.at, ended=ended, last=self.at.step == self.total_steps)

    def _after_step(self, epoch: int) -> bool:
        """Log, evaluate and save if due; True after an evaluation."""
        self.session.saver.poll()
        self.session.tell()
        step, end, due = self.at.step, self.at.step == self.total_steps, self.evaluations.due
        if step % self.spec.train.log_every == 0 or end or self._meter.first:
            self.session.add_up(epoch, self.detector.flag())
        if due or not self.session.vote.quick:
            self.session.tell()
        improved = self._evaluate() if due else False
        every = self.spec.checkpoint.every
        if every and (step % every == 0 or improved) and not self.evaluations.owed:
            self._save()
        return due

    def _evaluate(self) -> bool:
        """Evaluate, if there are held-out samples; True if the result is the best so far."""
        with self._meter.paused():
            how = self._preemption, self.session.pause, self._level
            better = self.evaluations.run(self.engine, self.at, *how)
        self.session.rescue.renew(self.at)
        return better

    def _level(self) -> None:
        """Give all ranks the same weights and buffers."""
        self.hook.level(self.module, self.live.optimizer)
        self.engine.share_buffers()

    def _facts(self) -> dict[str, Any]:
        """The plain data of a checkpoint of this step, besides the state."""
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
        """Start to save this step, unless it is saved or has bad numbers; a collective."""
        began, saver = time.monotonic(), self.session.saver
        if saver.saved != self.at.step:
            self.hook.level(self.module, self.live.optimizer)
            self.detector.check(self.at.step)
        looked = time.monotonic() - began
        with self._meter.paused(), self.heartbeat.patience():
            saver.save(self.at, self._facts(), looked)

    def _end(self, vote: StopVote | None = None) -> str:
        """Save, and record the outcome. A training whose last step is not saved is not done.

        Args:
            vote: the vote that stopped it; None at the training's end.

        Raises:
            CheckpointError: the last step cannot be saved.
        """
        session, last = self.session, self.evaluations.newest
        session.tell()
        self._save()
        at, facts = self.at, self._facts()
        with self.heartbeat.patience():
            if vote:
                session.saver.finish(at, facts)
            elif not session.saver.last(at, facts, lambda: session.asked(at.step)):
                return self._end(session.pause)
        outcome = "stopped" if vote else "done"
        session.end(outcome, vote, seed=self.spec.seed, **(vars(last) if last and not vote else {}))
        return outcome

    def close(self) -> None:
        """Wait for a running save, and delete the DDP wrapper: after the end of the process group
        its destructor may hang."""
        for part in (self.session, self.engine, self.data, self.evaluations):
            part.close()
