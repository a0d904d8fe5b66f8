"""Step 9: the training loop, in the names of the PyTorch DDP tutorials."""

from __future__ import annotations

import contextlib
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import hpcddp
from hpcddp.errors import CheckpointError, JobFileError
from hpcddp.preempt import Preemption
from hpcddp.rundir import RunDir
from hpcddp.spec import JobSpec
from hpcddp.train import checkpoint, optim, seeding
from hpcddp.train.data import Micro, Step, TrainData
from hpcddp.train.evaluate import Evaluation, Evaluator
from hpcddp.train.metrics import Recorder
from hpcddp.train.stop import StopVote
from hpcddp.train.task import Task
from hpcddp.train.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Position:
    """Where the training is: complete epochs, samples of the next one, optimizer steps."""

    step: int = 0
    epoch: int = 0
    samples_consumed: int = 0


class Trainer:
    """One rank's training of one attempt."""

    def __init__(
        self, run: RunDir, spec: JobSpec, task: Task, world: World, record: Recorder, attempt: int
    ) -> None:
        self.run, self.spec, self.task, self.world, self.record = run, spec, task, world, record
        self.attempt = attempt
        self.at = Position()
        self.best: dict[str, Any] = {}
        self.evaluation: Evaluation | None = None
        self._evaluator: Evaluator | None = None
        self._saved_step: int | None = None
        seeding.seed_all(spec.seed)  # the same weights on all ranks
        self.module: torch.nn.Module = task.model().to(world.device)
        seeding.seed_all(seeding.mix(spec.seed, world.rank.world_rank))
        self.data = TrainData(task.dataset("train"), spec, world)
        self.optimizer = optim.make_optimizer(task, self.module, spec.train)
        self.scheduler = optim.make_scheduler(
            task, self.optimizer, spec.train, self._total_steps()
        )
        self.scaler = _scaler(world.device, spec.train.precision)
        self.resumed = self._load()
        self.total_steps = self._total_steps()
        self.model = self._wrap()
        self._meter = Meter(world)

    def _wrap(self) -> DistributedDataParallel:
        """The model with its gradients averaged over ranks; ``self.module`` stays plain."""
        if self.spec.train.compile:
            self.module.compile()
        return DistributedDataParallel(
            self.module,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            static_graph=self.spec.ddp.static_graph,
            find_unused_parameters=self.spec.ddp.find_unused_parameters,
        )

    def _total_steps(self) -> int:
        """The step at which the training ends, from where it is now."""
        limits = [self.spec.max_steps] if self.spec.max_steps else []
        epochs = self.spec.epochs or (0 if limits else 1)
        if epochs:
            more = epochs - self.at.epoch
            ahead = (more - 1) * self.data.steps_left(0) if more > 0 else 0
            here = self.data.steps_left(self.at.samples_consumed) if more > 0 else 0
            limits.append(self.at.step + here + ahead)
        return min(limits)

    def train(self, preemption: Preemption) -> str:
        """Train to the end, or until all ranks agree to stop: "done" or "stopped"."""
        self._start()
        vote = StopVote(self.world, preemption, self.run.request)
        while self.at.step < self.total_steps:
            if self._run_epoch(vote):
                return self._end("stopped")
        if self.evaluation is None:
            self._evaluate()
        return self._end("done")

    def _start(self) -> None:
        self.record(
            "start",
            step=self.at.step,
            epoch=self.at.epoch,
            total_steps=self.total_steps,
            steps_per_epoch=self.data.steps_left(0),
            micro_batch=self.data.micro_batch,
            accumulation=self.data.accumulation,
            global_batch=self.spec.global_batch,
            resumed=str(self.resumed) if self.resumed else None,
            seed=self.spec.seed,
        )

    def _run_epoch(self, vote: StopVote) -> bool:
        """Train to the end of the epoch, or of the training; True when all ranks agreed to stop."""
        epoch = self.at.epoch
        batches = self.data.batches(epoch, self.at.samples_consumed)
        self._meter.restart()
        while self.at.epoch == epoch and self.at.step < self.total_steps:
            self._run_batch(batches)
            evaluated = self._after_step(epoch)
            if self.at.step < self.total_steps and vote.agreed(self.at.step, now=evaluated):
                return True
        return False

    def _run_batch(self, batches: Iterator[Any]) -> None:
        """One optimizer step on the global batch's share of this rank."""
        step = self.data.step_at(self.at.samples_consumed)
        last = len(step.micros) - 1
        for i, micro in enumerate(step.micros):
            sync = contextlib.nullcontext() if i == last else self.model.no_sync()
            with sync:
                self._run_micro(next(batches), micro, step)
        self._meter.norm = self._update()
        self._advance(step)

    def _run_micro(self, batch: Any, micro: Micro, step: Step) -> None:
        """Forward and backward. DDP divides by the world size; the weight makes the sum over
        ranks and micro-batches the mean over the step's samples."""
        inputs, targets = self.data.place(batch, micro)
        with self._autocast():
            loss: Tensor = self.task.loss(self.model(inputs), targets)
        weight = micro.real * self.world.size / step.samples
        self.scaler.scale(loss if weight == 1 else loss * weight).backward()
        self._meter.add(loss.detach(), micro.real)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.spec.train.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, DTYPES[self.spec.train.precision])

    def _update(self) -> Tensor | None:
        """Change the weights. Returns the gradient's norm where it is clipped."""
        norm = None
        if self.spec.train.clip_norm:
            self.scaler.unscale_(self.optimizer)
            norm = clip_grad_norm_(self.module.parameters(), self.spec.train.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._meter.lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step()
        return norm

    def _advance(self, step: Step) -> None:
        self.at.step += 1
        self.at.samples_consumed += step.samples
        self.evaluation = None
        if self.data.steps_left(self.at.samples_consumed) == 0:
            self.at.epoch += 1
            self.at.samples_consumed = 0

    def _after_step(self, epoch: int) -> bool:
        """Log, evaluate and save, where they are due; True when it evaluated."""
        step, end = self.at.step, self.at.step == self.total_steps
        if step % self.spec.train.log_every == 0 or end or self._meter.first:
            self.record("train", step=step, epoch=epoch, **self._meter.read(self.spec.global_batch))
        ended, each = self.at.epoch > epoch, self.spec.train.eval_every
        due = end or (ended and each > 0 and self.at.epoch % each == 0)
        improved = self._evaluate() if due else False
        every = self.spec.checkpoint.every
        if every and (step % every == 0 or improved):
            self._save()
        return due

    def _evaluate(self) -> bool:
        """Evaluate on the held-out samples, if there are any; True when it is the best so far."""
        with self._meter.paused():
            if self._evaluator is None:
                dataset = self.task.dataset("eval")
                if dataset is None:
                    return False
                self._evaluator = Evaluator(dataset, self.task, self.spec, self.world)
            with self._autocast():
                self.evaluation = self._evaluator(self.module)
        metrics, count, counted = self.evaluation
        self.record(
            "eval",
            step=self.at.step,
            epoch=self.at.epoch,
            count=count,
            metrics=metrics,
            counted=counted,
        )
        return self._improved(metrics)

    def _improved(self, metrics: dict[str, float]) -> bool:
        """Whether this is the best evaluation so far, by ``checkpoint.best``."""
        name = self.spec.checkpoint.best
        if not name:
            return False
        if name not in metrics:
            raise JobFileError(
                f"checkpoint.best is {name!r}, but the evaluation gives {', '.join(metrics)}",
                where="checkpoint.best",
            )
        value, sign = metrics[name], 1 if self.spec.checkpoint.best_mode == "max" else -1
        if self.best.get("metric") == name and not sign * value > sign * self.best["value"]:
            return False
        self.best = {"metric": name, "value": value, "step": self.at.step}
        return True

    def _end(self, outcome: str) -> str:
        """Save, and say how it ended."""
        self._save()
        result: dict[str, Any] = {}
        if outcome == "done" and self.evaluation is not None:
            metrics, count, counted = self.evaluation
            result = {"metrics": metrics, "count": count, "counted": counted}
        self.record("end", outcome=outcome, step=self.at.step, seed=self.spec.seed, **result)
        return outcome

    def _save(self) -> None:
        """Save a checkpoint of this step, unless there is one; a collective."""
        if self._saved_step == self.at.step:
            return
        from hpcddp.train.state import State, rng_tensors

        with self._meter.paused():
            began = time.monotonic()
            state = State(self.module, self.optimizer)
            tensors = {
                **state.tensors,
                **rng_tensors(self.world.rank.world_rank, self.world.device),
            }
            meta = self._meta()
            meta["optimizer"] = {"param_groups": state.groups(), "state": state.plain}
            path, size = checkpoint.save(self.run, self.attempt, self.world, tensors, meta)
            if self.world.is_main:
                keep = self.spec.checkpoint.keep
                checkpoint.prune(self.run.checkpoints, keep, self.best.get("step"))
            self._saved_step = self.at.step
            seconds = time.monotonic() - began
        name = str(path.relative_to(self.run.path))
        self.record("checkpoint", step=self.at.step, path=name, seconds=seconds, bytes=size)

    def _meta(self) -> dict[str, Any]:
        """What a checkpoint says in plain data; samples_consumed counts in the epoch begun."""
        return {
            **vars(self.at),
            "run": self.run.name,
            "attempt": self.attempt,
            "world": self.world.size,
            "global_batch": self.spec.global_batch,
            "seed": self.spec.seed,
            "total_steps": self.total_steps,
            "schedule": self.spec.train.schedule,
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "best": self.best,
            "metrics": self.evaluation.metrics if self.evaluation else {},
            "versions": {
                "hpcddp": hpcddp.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
