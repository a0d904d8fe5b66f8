"""Evaluation over all ranks, in which every held-out sample counts exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Subset

from hpcddp.errors import JobFileError
from hpcddp.spec import CheckpointSpec, JobSpec
from hpcddp.train import seeding
from hpcddp.train.data import end_workers, make_loader, to_device
from hpcddp.train.pulse import Pulse
from hpcddp.train.samples import Samples
from hpcddp.train.task import Task
from hpcddp.train.world import World


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out samples, their number, and how many a truth value holds for."""

    metrics: dict[str, float]
    count: int
    counted: dict[str, int]


def improved(best: dict[str, Any], metrics: dict[str, float], spec: CheckpointSpec) -> bool:
    """Whether these metrics are the best so far, by ``checkpoint.best``."""
    if not spec.best:
        return False
    if spec.best not in metrics:
        raise JobFileError(
            f"checkpoint.best is {spec.best!r}, but the evaluation gives {', '.join(metrics)}",
            where="checkpoint.best",
            hint='name one of them, or write best = ""',
        )
    sign = 1 if spec.best_mode == "max" else -1
    known = best.get("metric") == spec.best
    if math.isnan(metrics[spec.best]):
        return False
    return not known or sign * metrics[spec.best] > sign * float(best["value"])


def make(task: Task, spec: JobSpec, world: World, pulse: Pulse) -> Evaluator | None:
    """None without held-out samples. They are the same in every life and on all ranks, also where
    the task draws them."""
    with seeding.untouched(world.device):
        seeding.seed_all(seeding.mix(spec.seed, -1))
        dataset = task.dataset("eval")
    return None if dataset is None else Evaluator(dataset, task, spec, world, pulse)


class Evaluator:
    """This rank's part of the held-out samples: every world-size-th one, without padding."""

    def __init__(self, dataset: Any, task: Task, spec: JobSpec, world: World, pulse: Pulse) -> None:
        self._task, self._world, self._pulse = task, world, pulse
        self.count = len(dataset)
        if self.count == 0:
            raise JobFileError(
                "dataset('eval') is empty",
                where=task.name,
                hint="return None where there is nothing to evaluate on",
            )
        mine = range(world.rank.world_rank, self.count, world.size)
        self._common = -(-(self.count // world.size) // spec.data.eval_batch)  # batches of all
        # A rank without a sample takes one that does not count, to have the metrics' names.
        self._weight = 1 if mine else 0
        samples = Samples(dataset, seeding.mix(spec.seed, -1))  # draws other numbers than training
        self._loader = make_loader(
            Subset(samples, mine or range(1)),
            spec.data.workers,
            world.device,
            batch_size=spec.data.eval_batch,
            generator=torch.Generator().manual_seed(0),
        )

    def __call__(
        self,
        model: nn.Module,
        stop: Callable[[], bool] = lambda: False,
        after: Callable[[], object] = lambda: None,
    ) -> Evaluation | None:
        """Evaluate the model; a collective. None if it was broken off.

        Args:
            model: not wrapped, since ranks' batches differ.
            stop: asked before every batch that all ranks have; the same answer on all of them.
            after: called after every batch.
        """
        training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                found = self._sums(model, stop, after)
        finally:
            model.train(training)
        if found is None:
            return None
        sums, counts = found
        totals = torch.stack(list(sums.values())).mul_(self._weight)
        if self._world.size > 1:
            dist.all_reduce(totals)
        values = dict(zip(sums, totals.tolist(), strict=True))
        return Evaluation(
            {name: value / self.count for name, value in values.items()},
            self.count,
            {name: round(values[name]) for name in counts},
        )

    def close(self) -> None:
        end_workers(self._loader)

    def _sums(
        self, model: nn.Module, stop: Callable[[], bool], after: Callable[[], object]
    ) -> tuple[dict[str, Tensor], set[str]] | None:
        """Sums over this rank's samples, and the names of those that count truth values."""
        zero = torch.zeros((), dtype=torch.float64, device=self._world.device)
        sums: dict[str, Tensor] = {}
        counts: set[str] = set()
        for i, batch in enumerate(self._loader):
            if i < self._common and stop():
                return None
            self._pulse.touch()
            inputs, targets = to_device(batch, self._world.device)
            output = model(inputs)
            values = self._values(output, targets)
            size = next((len(v) for v in values.values()), _size(targets, inputs))
            loss = self._task.loss(output, targets)
            sums["loss"] = sums.get("loss", zero) + loss.double() * size
            for name, value in values.items():
                sums[name] = sums.get(name, zero) + value.double().sum()
                if value.dtype == torch.bool:
                    counts.add(name)
            after()
        return dict(sorted(sums.items())), counts

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
                f"metrics() gives shapes {sizes}",
                where=self._task.name,
                hint="give one value per sample, of shape [batch], under names other than loss",
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
    raise TypeError("a batch without a tensor")
