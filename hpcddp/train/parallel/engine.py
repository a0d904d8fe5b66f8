"""Runs the forward and backward passes of an optimizer step, depending on the strategy.

``Plain`` calls the model for each micro-batch. ``Pipeline`` passes all micro-batches of a step to a
schedule of torch.distributed.pipelining. After either, each gradient is the mean over the step's
samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hpcddp.spec import JobSpec
from hpcddp.train.input.batches import Micro, Step, TrainData
from hpcddp.train.parallel import model
from hpcddp.train.parallel.hooks import Hook
from hpcddp.train.rank.spread import Spread
from hpcddp.train.rank.task_module import Task

Batches = Iterator[tuple[list[int], Any]]
# Called with sample indices, micro-batch and mean loss, if this rank computes the loss.
OnLoss = Callable[[list[int], Micro, Tensor], None]


class Engine(Protocol):
    """The trainer's view of a spread model."""

    def run(self, batches: Batches, step: Step, scaler: Any, on_loss: OnLoss) -> None:
        """Forward and backward over a step's micro-batches; a collective."""

    def infer(self, inputs: Any) -> Any:
        """The output, on ranks that have it; None on others. A collective if a pass needs several
        ranks. Only within ``evaluating``."""

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Set the model to evaluation within, and back afterwards."""

    def share_buffers(self) -> None:
        """Give all ranks the buffers that are saved; a collective."""

    def close(self) -> None:
        """Delete objects that must not outlive the process group."""


class Plain:
    """Each rank calls the whole model, or its part of each layer.

    Args:
        module: the model, plain or divided.
        hook: the DDP communication hook.
    """

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        spec: JobSpec,
        spread: Spread,
        data: TrainData,
        hook: Hook,
    ) -> None:
        self._module, self._task, self._spec = module, task, spec
        self._spread, self._data = spread, data
        self._model: nn.Module = model.wrap(module, spec, spread, hook)
        self._buffers = [] if spread.layout.plain else model.saved_buffers([module])
        self._first = True  # before the first step of this process

    def run(self, batches: Batches, step: Step, scaler: Any, on_loss: OnLoss) -> None:
        if not self._spread.layout.plain:
            self.share_buffers()
        last = len(step.micros) - 1
        # DDP learns a static graph in a first backward pass, which must synchronise.
        always = self._spec.ddp.static_graph and self._first
        for i, micro in enumerate(step.micros):
            with self._synchronised(i == last or always):
                self._run_micro(next(batches), micro, step, scaler, on_loss)
        if not step.micros and isinstance(self._model, DistributedDataParallel):
            model.answer(self._model, scaler)
        self._first = False

    def _synchronised(self, yes: bool) -> contextlib.AbstractContextManager[Any]:
        """Average gradients over ranks in this backward pass, or do not."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(yes)
            self._model.set_is_last_backward(yes)
        elif isinstance(self._model, DistributedDataParallel) and not yes:
            return self._model.no_sync()
        return contextlib.nullcontext()

    def _run_micro(
        self, taken: tuple[list[int], Any], micro: Micro, step: Step, scaler: Any, on_loss: OnLoss
    ) -> None:
        """Gradients are divided by the number of data ranks; with the weight, the sum over ranks
        and micro-batches is the mean over the step's samples."""
        ids, batch = taken
        inputs, targets = self._data.place(batch, micro)
        divided, device = self._spread.divided, self._spread.world.device
        with model.autocast(device, self._spec.train.precision, divided=divided):
            loss: Tensor = self._task.loss(self._model(inputs), targets)
        weight = micro.real * self._spread.data_size / step.samples
        scaler.scale(loss if weight == 1 else loss * weight).backward()
        if self._spread.speaks:
            on_loss(ids, micro, loss.detach())

    def infer(self, inputs: Any) -> Any:
        return self._module(inputs)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return evaluating([self._module], plain=self._spread.layout.plain)

    def share_buffers(self) -> None:
        if isinstance(self._model, DistributedDataParallel):
            model.share_buffers(self._model, again=False)
        elif not self._spread.layout.plain:
            self._spread.share(self._buffers)

    def close(self) -> None:
        del self._model


@contextlib.contextmanager
def evaluating(modules: Sequence[nn.Module], *, plain: bool) -> Iterator[None]:
    """Disable gradients, and set each module to evaluation.

    Args:
        plain: the modules are not divided. fully_shard keeps gathered parameters until a backward
            pass, which cannot use tensors of the inference mode.
    """
    training = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with torch.inference_mode() if plain else torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, training, strict=True):
            module.train(mode)
            if isinstance(module, FSDPModule):
                module.reshard()
