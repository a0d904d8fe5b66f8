"""The model in stages: micro-batches pass through them one after the other.

Stage s is on the rank with pp = s modulo the number of ranks in a pipeline; the first stage has
the inputs, the last one the losses. Schedules: GPipe (Huang et al., 2019), 1F1B and interleaved
1F1B (Narayanan et al., 2021).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.utils import _pytree as pytree

from hpcddp.errors import JobFileError
from hpcddp.spec import JobSpec
from hpcddp.train.input import seeding
from hpcddp.train.input.batches import Step, TrainData
from hpcddp.train.parallel import model
from hpcddp.train.parallel.cut import Chain
from hpcddp.train.parallel.engine import Batches, OnLoss, evaluating
from hpcddp.train.rank.spread import Spread
from hpcddp.train.rank.task_module import Task

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
PER_RANK = {"interleaved": 2}  # stages of one rank, if more than one


def stages_of(spec: JobSpec, ranks: int) -> int:
    """Number of stages of a pipeline of ``ranks`` ranks."""
    return ranks * PER_RANK.get(spec.pp.schedule, 1)


class Pipeline:
    """Runs this rank's stages.

    Args:
        chains: the modules of the stages, in order.
    """

    def __init__(
        self,
        chains: Sequence[Chain],
        task: Task,
        spec: JobSpec,
        spread: Spread,
        data: TrainData,
    ) -> None:
        self._task, self._spec, self._spread, self._data = task, spec, spread, data
        self._ranks = spread.layout.pp
        self._group = spread.group("pp")
        self._chains = list(chains)
        self._buffers = model.saved_buffers(chains)
        self._models: list[nn.Module] = [model.wrap(chain, spec, spread) for chain in chains]
        self._schedule: Any = None
        self._weight = 1.0  # of a micro-batch's mean loss
        self._scaler: Any = None
        self._losses: list[Tensor] = []
        self._targets: list[Any] = []

    def run(self, batches: Batches, step: Step, scaler: Any, on_loss: OnLoss) -> None:
        self.share_buffers()
        taken = [next(batches) for _ in step.micros]
        placed = [
            self._data.place(batch, micro)
            for (_, batch), micro in zip(taken, step.micros, strict=True)
        ]
        self._weight = step.micros[0].real * self._spread.data_size / step.samples
        self._scaler, self._losses = scaler, []
        device, precision = self._spread.world.device, self._spec.train.precision
        if self._schedule is None:
            self._schedule = self._make_schedule(placed[0][0], len(placed))
        self._targets = [targets for _, targets in placed]
        first, last = self._spread.place.pp == 0, self._spread.last
        if not last:
            scaler.scale(torch.zeros((), device=device))  # initialises the scaler
        with model.autocast(device, precision, divided=self._spread.divided):
            self._schedule.step(
                *(_joined([inputs for inputs, _ in placed]) if first else []),
                **({"target": torch.arange(len(placed))} if last else {}),
            )
        for (ids, _), micro, loss in zip(taken, step.micros, self._losses, strict=False):
            if self._spread.speaks:
                on_loss(ids, micro, loss)

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        """The loss of a micro-batch. torch passes its number, as targets have any structure."""
        loss: Tensor = self._task.loss(output, self._targets[int(number)])
        self._losses.append(loss.detach())
        scaled: Tensor = self._scaler.scale(loss if self._weight == 1 else loss * self._weight)
        return scaled

    def _make_schedule(self, inputs: Any, count: int) -> Any:
        """The schedule for ``count`` micro-batches like this one; a collective.

        A forward pass here finds the shapes: torch would run a training pass on uninitialised
        memory, which changes a BatchNorm.
        """
        seen: list[tuple[tuple[Tensor, ...], Any]] = []
        with (
            seeding.untouched(self._spread.world.device),
            self.evaluating(),
            model.autocast(self._spread.world.device, self._spec.train.precision),
        ):
            self._forward(inputs, seen)
        total = self._ranks * len(self._chains)
        stages = [
            PipelineStage(
                wrapped,
                self._spread.place.pp + i * self._ranks,
                total,
                self._spread.world.device,
                input_args=tuple(_like(x, grad=self._spread.place.pp + i > 0) for x in given),
                output_args=_like(made, grad=True),
                group=self._group,
            )
            for i, (wrapped, (given, made)) in enumerate(zip(self._models, seen, strict=True))
        ]
        kind = SCHEDULES[self._spec.pp.schedule]
        what: Any = stages if len(stages) > 1 else stages[0]
        return kind(what, n_microbatches=count, loss_fn=self._loss, scale_grads=False)

    def infer(self, inputs: Any) -> Any:
        return self._forward(inputs, [])

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return evaluating(self._chains, plain=False)

    def _forward(self, value: Any, seen: list[tuple[tuple[Tensor, ...], Any]]) -> Any:
        """One forward pass through all stages, with the output on the last one's rank; a collective
        of the pipeline's ranks. The inputs and outputs of this rank's stages go into ``seen``."""
        rank = self._spread.place.pp
        for i, chain in enumerate(self._chains):
            if rank > 0 or i > 0:
                value = self._receive((rank - 1) % self._ranks)
            else:
                chain.form = pytree.tree_structure(value)
            given = tuple(pytree.tree_leaves(value))
            output = chain(*given)
            seen.append((given, output))
            if rank < self._ranks - 1 or i < len(self._chains) - 1:
                self._send(output, (rank + 1) % self._ranks)
            value = output
        return value if self._spread.last else None

    def _send(self, value: Any, to: int) -> None:
        if not isinstance(value, Tensor):
            raise JobFileError(
                f"a stage of the pipeline returned a {type(value).__name__}, expected one tensor",
                where=self._task.name,
                hint="return one tensor from each of the model's parts",
            )
        peer = dist.get_global_rank(self._group, to)
        control = self._spread.world.control
        dist.send_object_list([(value.shape, value.dtype)], dst=peer, group=control)
        dist.send(value.contiguous(), dst=peer, group=self._group)

    def _receive(self, source: int) -> Tensor:
        peer = dist.get_global_rank(self._group, source)
        facts: list[Any] = [None]
        dist.recv_object_list(facts, src=peer, group=self._spread.world.control)
        shape, dtype = facts[0]
        value = torch.empty(shape, dtype=dtype, device=self._spread.world.device)
        dist.recv(value, src=peer, group=self._group)
        return value

    def share_buffers(self) -> None:
        self._spread.share(self._buffers)

    def close(self) -> None:
        del self._models, self._schedule


def _joined(values: Sequence[Any]) -> list[Tensor]:
    """Concatenate micro-batches of equal size; the schedule divides them again."""
    leaves = [pytree.tree_leaves(value) for value in values]
    return [torch.cat(parts) for parts in zip(*leaves, strict=True)]


def _like(value: Tensor, *, grad: bool) -> Tensor:
    """A tensor of the same shape and dtype, without values."""
    empty = torch.empty_like(value, device="meta")
    return empty.requires_grad_(grad and empty.is_floating_point())
