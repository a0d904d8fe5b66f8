"""Evaluation over all ranks, in which every held-out sample counts exactly once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from hpcddp.errors import JobFileError
from hpcddp.preempt import Preemption
from hpcddp.spec import CheckpointSpec, JobSpec
from hpcddp.train.checkpoint.snapshot import Position
from hpcddp.train.input import seeding
from hpcddp.train.input.batches import placed
from hpcddp.train.input.data_workers import end_workers, make_loader, read
from hpcddp.train.input.samples import Samples
from hpcddp.train.monitor.heartbeat import Heartbeat
from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.parallel import model
from hpcddp.train.parallel.engine import Engine
from hpcddp.train.rank.spread import Spread
from hpcddp.train.rank.task_module import Task
from hpcddp.train.stop import StopVote


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out samples, their number, and the counts of boolean metrics."""

    metrics: dict[str, float]
    count: int
    counted: dict[str, int]


def improved(best: dict[str, Any], metrics: dict[str, float], spec: CheckpointSpec) -> bool:
    """Whether these metrics are the best so far, by ``checkpoint.best``."""
    if not spec.best:
        return False
    if spec.best not in metrics:
        raise JobFileError(
            f"checkpoint.best is {spec.best!r}, but the evaluation has {', '.join(metrics)}",
            where="checkpoint.best",
            hint='use one of them, or set best = ""',
        )
    sign = 1 if spec.best_mode == "max" else -1
    known = best.get("metric") == spec.best
    if math.isnan(metrics[spec.best]):
        return False
    return not known or sign * metrics[spec.best] > sign * float(best["value"])


def make(task: Task, spec: JobSpec, spread: Spread, heartbeat: Heartbeat) -> Evaluator | None:
    """The evaluator; None without held-out samples. The samples are the same in every attempt and
    on all ranks, even if the task draws them at random."""
    with seeding.untouched(spread.world.device):
        seeding.seed_all(seeding.mix(spec.seed, -1))
        dataset = task.dataset("eval")
    return None if dataset is None else Evaluator(dataset, task, spec, spread, heartbeat)


class Evaluations:
    """The evaluations of a training.

    ``newest`` is the one of the current weights, or None. ``owed`` is True if a stop interrupted
    one, ``due`` until the one that this step asks for has ended: the next attempt repeats it.
    ``best`` is the best by ``checkpoint.best``.
    """

    def __init__(
        self, task: Task, spec: JobSpec, spread: Spread, heartbeat: Heartbeat, record: Recorder
    ) -> None:
        self._task, self._spec, self._spread = task, spec, spread
        self._heartbeat, self._record = heartbeat, record
        self.newest: Evaluation | None = None
        self.best: dict[str, Any] = {}
        self.owed = self.due = False
        self._evaluator: Evaluator | None = None  # without held-out samples
        self._made = False
        self._batches = 0

    def go_on(self, meta: dict[str, Any]) -> None:
        """Load the state from a checkpoint's meta."""
        self.newest, self.best, self.owed = None, meta.get("best") or {}, bool(meta.get("owed"))

    def step(self, at: Position, *, ended: bool, last: bool) -> None:
        """Note that a step was taken, and whether it asks for an evaluation.

        Args:
            ended: it has ended an epoch.
            last: it is the training's last.
        """
        each = self._spec.train.eval_every
        self.newest, self.due = None, last or (ended and each > 0 and at.epoch % each == 0)

    def facts(self) -> dict[str, Any]:
        """The state, for a checkpoint's meta."""
        metrics = self.newest.metrics if self.newest else {}
        return {"best": self.best, "metrics": metrics, "owed": self.owed or self.due}

    def run(
        self, engine: Engine, at: Position, preemption: Preemption, vote: StopVote,
        prepare: Callable[[], None],
    ) -> bool:  # fmt: skip
        """Evaluate on the held-out samples, if any; True if the result is the best so far.

        Args:
            vote: the agreement of all ranks to interrupt it.
            prepare: called before the first batch, if there is one.
        """
        with contextlib.ExitStack() as start:
            if not self._made:  # slow until after the first batch
                start.enter_context(self._heartbeat.patience())
                self._evaluator = make(self._task, self._spec, self._spread, self._heartbeat)
                preemption.renew()
                self._made = True
            if self._evaluator is None:
                self.due = False
                return False
            prepare()
            device = self._spread.world.device
            with (
                seeding.untouched(device),
                model.autocast(device, self._spec.train.precision, divided=self._spread.divided),
            ):
                self.newest = self._evaluator(engine, lambda: self._stops(vote, at), start.close)
        self.owed = self.newest is None
        better = self.newest is not None and self._judge(self.newest, at)
        self.due = False  # last, as a save at a failure may read the facts at any moment
        return better

    def _stops(self, vote: StopVote, at: Position) -> bool:
        self._batches += 1
        return vote.agreed(self._batches, step=at.step)

    def _judge(self, evaluation: Evaluation, at: Position) -> bool:
        """Record it; True if it is the best so far."""
        self._record("eval", step=at.step, epoch=at.epoch, **vars(evaluation))
        better = improved(self.best, evaluation.metrics, self._spec.checkpoint)
        if better:
            name = self._spec.checkpoint.best
            self.best = {"metric": name, "value": evaluation.metrics[name], "step": at.step}
        return better

    def close(self) -> None:
        if self._evaluator:
            self._evaluator.close()


class Evaluator:
    """Evaluates this rank's samples: every n-th held-out one with n data ranks, without padding."""

    def __init__(
        self, dataset: Any, task: Task, spec: JobSpec, spread: Spread, heartbeat: Heartbeat
    ) -> None:
        self._task, self._spread, self._heartbeat = task, spread, heartbeat
        self._world, self._double = spread.world, spec.train.precision == "fp64"
        self.count = len(dataset)
        if self.count == 0:
            raise JobFileError(
                "dataset('eval') is empty",
                where=task.name,
                hint="return None if there are no samples to evaluate on",
            )
        ranks, size = spread.data_size, spec.data.eval_batch
        indices = range(spread.data_rank, self.count, ranks)
        self._common = math.ceil(self.count // ranks / size)  # batches that all ranks have
        self._most = math.ceil(math.ceil(self.count / ranks) / size)  # most batches of a rank
        # A rank without samples runs one that does not count, to learn the metrics' names.
        self._counts = bool(indices) and spread.speaks
        samples = Samples(dataset, seeding.mix(spec.seed, -1))  # not the numbers of training
        self._loader = make_loader(
            Subset(samples, indices or range(1)),
            max(0, spec.data.workers),
            self._world.device,
            prefetch=spec.data.prefetch,
            batch_size=size,
            generator=torch.Generator().manual_seed(0),
        )

    def __call__(
        self,
        engine: Engine,
        stop: Callable[[], bool] = lambda: False,
        after: Callable[[], object] = lambda: None,
    ) -> Evaluation | None:
        """Evaluate the model; a collective. None if it was interrupted.

        Args:
            stop: called before every batch that all ranks have; the same result on all of them.
            after: called after every batch.
        """
        with engine.evaluating():
            result = self._sums(engine, stop, after)
        if result is None:
            return None
        sums, counts = result
        own = {name: float(value) for name, value in sums.items()} if self._counts else {}
        values: dict[str, float] = {}
        truths = set[str]()
        for theirs, names in self._world.gather((own, counts)):
            values |= {name: values.get(name, 0.0) + value for name, value in theirs.items()}
            truths |= names
        return Evaluation(
            {name: value / self.count for name, value in sorted(values.items())},
            self.count,
            {name: round(values[name]) for name in sorted(truths)},
        )

    def close(self) -> None:
        end_workers(self._loader)

    def _sums(
        self, engine: Engine, stop: Callable[[], bool], after: Callable[[], object]
    ) -> tuple[dict[str, Tensor], set[str]] | None:
        """Sums over this rank's samples, and the names of the boolean metrics."""
        inputs: Any = None
        zero = torch.zeros((), dtype=torch.float64, device=self._world.device)
        sums: dict[str, Tensor] = {}
        counts: set[str] = set()
        for i, batch in enumerate(read(self._loader)):
            if i < self._common and stop():
                return None
            self._heartbeat.touch()
            inputs, targets = placed(batch, self._world.device, double=self._double)
            output = engine.infer(inputs)
            if not self._spread.last:
                after()
                continue
            values = self._values(output, targets)
            size = next((len(v) for v in values.values()), _size(targets, inputs))
            loss = self._task.loss(output, targets)
            sums["loss"] = sums.get("loss", zero) + loss.double() * size
            for name, value in values.items():
                sums[name] = sums.get(name, zero) + value.double().sum()
                if value.dtype == torch.bool:
                    counts.add(name)
            after()
        if not self._spread.layout.plain:  # other ranks need this one for their last batch
            for _ in range(len(self._loader), self._most):
                engine.infer(inputs)
        return sums, counts

    def _values(self, output: Any, targets: Any) -> dict[str, Tensor]:
        """The task's metrics of one batch, one value per sample."""
        if self._task.metrics is None:
            return {}
        values: dict[str, Tensor] = self._task.metrics(output, targets)
        sizes = {name: tuple(getattr(v, "shape", ())) for name, v in values.items()}
        if (
            "loss" in values
            or any(len(s) != 1 for s in sizes.values())
            or len({*sizes.values()}) > 1
        ):
            raise JobFileError(
                f"metrics() returned shapes {sizes}",
                where=self._task.name,
                hint="return one value per sample, of shape [batch], under names other than loss",
            )
        return values


def _size(*batches: Any) -> int:
    """Samples in a batch: the length of the first tensor in it."""
    for value in batches:
        if isinstance(value, Tensor):
            return len(value)
        if isinstance(value, dict):
            return _size(*value.values())
        if isinstance(value, list | tuple):
            return _size(*value)
    raise TypeError("the batch contains no tensor")
