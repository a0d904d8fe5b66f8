"""A Lightning Trainer on its run: what ``hpcddp.attach`` is for a loop of one's own.

    from hpcddp.lightning import Preemptible

    trainer = lightning.Trainer(..., callbacks=[Preemptible()])

The weights and the first optimizer lie in the run's checkpoints as those of any loop. The rest of
Lightning's own checkpoint lies beside them. The run saves and stops between two batches of the
train loader, when Lightning has done all that belongs to a step. There the state is put back too,
so that the loops count on from the exact batch. Outside of a job this does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import UserError
from hpcddp.train.attach import attach
from hpcddp.train.loop import Run

# One of two packages with the same content: the one that the script has.
if TYPE_CHECKING or ("pytorch_lightning" not in sys.modules and find_spec("lightning")):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
else:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy


# Undocumented parts of Lightning's loops that a resume needs.
LOOP = ("restarted_mid_epoch", "on_iteration_done", "_data_fetcher", "_combined_loader")
EPOCH_LOOP = ("reset_restart_stage", "batch_progress")


class Preemptible(Callback):
    """Lets ``Trainer.fit`` go on with its run, from the newest checkpoint of it.

    Args:
        save_every: optimizer steps between two checkpoints; 0 saves only when it stops or ends.
        keep: newest checkpoints that are kept.
        log_every: optimizer steps between two records.
    """

    def __init__(self, *, save_every: int = 100, keep: int = 2, log_every: int = 10) -> None:
        self.run: Run | None = None
        options = {"save_every": save_every, "keep": keep, "log_every": log_every}
        self._options: dict[str, Any] = options
        self._steps = 0  # Lightning's count, when it was last looked at
        self._loader: Any = None
        self._counters: dict[str, Any] = {}  # of an epoch that was begun in an earlier attempt

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or "HPCDDP_RUN_DIR" not in os.environ:
            return
        if self.run:
            raise UserError(
                "a run is one call of Trainer.fit, and this is another",
                where="Preemptible",
                hint="make a run of each, or take the callback out of the other Trainer",
            )
        _check_loops(trainer)
        # Lightning's handlers talk to the other ranks from within a signal, end a run as if it
        # were complete, and requeue by themselves in a Slurm job.
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        process = trainer.strategy.process_dataloader

        def placed(dataloader: object) -> object:
            loader = process(dataloader)
            return _Placed(self, trainer, loader) if trainer.training else loader

        trainer.strategy.process_dataloader = placed  # type: ignore[method-assign]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "HPCDDP_RUN_DIR" not in os.environ:
            return
        model, first = _checked(trainer), trainer.optimizers[0]
        self._rest = _Rest(trainer)
        self.run = attach(model, first, more=self._rest, **self._options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let Lightning begin the epoch's loop as any: its own way back guesses where it was."""
        self._steps, loop = trainer.global_step, trainer.fit_loop
        if self.run:  # a schedule may wait for the metrics of a validation before the stop
            trainer._logger_connector._callback_metrics.update(self._rest.metrics)
        assert loop._combined_loader is not None  # it has a len(), which may fail
        loaders = len(loop._combined_loader.flattened)
        if self.run and loaders > 1:
            raise UserError(
                f"there are {loaders} train loaders",
                where="Preemptible",
                hint="it serves one: combine them in its dataset",
            )
        if self.run and self.run.resumed and loop.restarted_mid_epoch:
            self._counters = loop.epoch_loop.state_dict()
            loop.epoch_loop.restarting = False
            loop.epoch_loop.reset_restart_stage()

    def batches(self, trainer: Trainer, loader: Any) -> Iterator[Any]:
        """The batches of Lightning's epoch that were not trained on."""
        assert self.run
        self._loader = loader
        if trainer.current_epoch != self.run.epoch:
            self.run.at(trainer.current_epoch, 0, loader)
        used = self.run.used(loader)
        for batch in self.run.batches(loader):
            if self._counters:
                self._count_on(trainer, used)
            yield batch
        if self._counters:  # the only batch left was read ahead, before the epoch's loop began
            self._count_on(trainer, used)

    def _count_on(self, trainer: Trainer, used: int) -> None:
        """Put the loops' counters where the run was: it was here that they were saved.

        Args:
            used: batches of the epoch; not what was saved, where there were more ranks or fewer.
        """
        loop, counters = trainer.fit_loop, self._counters
        self._counters = {}
        loop.epoch_loop.load_state_dict(counters)
        loop.epoch_loop.restarting = False
        loop.on_iteration_done()  # what follows is no restart
        loop.epoch_loop.batch_progress.current.load_state_dict(
            dict.fromkeys(("ready", "started", "processed", "completed"), used)
        )
        assert loop._data_fetcher
        loop._data_fetcher.fetched = used

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.run is None or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        used = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self.run.at(trainer.current_epoch, used, self._loader)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.run.step(loss if isinstance(loss, Tensor) else None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.run:
            self.run.finish()


def _check_loops(trainer: Trainer) -> None:
    """A Lightning of another make is refused at the start, and not at the first way back."""
    loop = trainer.fit_loop
    lacks = [name for name in LOOP if not hasattr(loop, name)]
    lacks += [name for name in EPOCH_LOOP if not hasattr(loop.epoch_loop, name)]
    if lacks:
        raise UserError(
            f"the loops of this Lightning have no {lacks[0]}",
            where="Preemptible",
            hint="take Lightning 2.6, or another release that has it",
        )


def _checked(trainer: Trainer) -> Module:
    """The model, as the strategy runs it; UserError where its ranks have not all of it."""
    model, strategy = trainer.strategy.model, trainer.strategy
    whole = model is trainer.lightning_module or isinstance(model, DistributedDataParallel)
    if model is not None and whole and isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        return model
    raise UserError(
        f"Preemptible does not know how {type(strategy).__name__} spreads a model",
        where="Trainer(strategy=...)",
        hint='it serves strategy="ddp", and a single device',
    )


class _Rest:
    """Lightning's state beside the weights and the first optimizer: loops, callbacks, schedules,
    more optimizers, loss scaling, the data module, and additions of hooks."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.metrics: dict[str, Tensor] = {}  # that were logged last, when it was saved

    def state_dict(self) -> dict[str, Any]:
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        del checkpoint["state_dict"], checkpoint["optimizer_states"][0]
        # Those of the script count, as in every attempt.
        hparams = ("hyper_parameters", "hparams_name", "hparams_type")
        kept = {name: value for name, value in checkpoint.items() if not name.endswith(hparams)}
        metrics = {n: v.detach().clone() for n, v in self._trainer.callback_metrics.items()}
        return {**kept, "should_stop": self._trainer.should_stop, "metrics": metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it into what Lightning restores from; a checkpoint that the script names comes only
        before the run's first one."""
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        trainer.should_stop = state.pop("should_stop")
        self.metrics = state.pop("metrics")
        state["state_dict"] = trainer.lightning_module.state_dict()
        state["optimizer_states"].insert(0, trainer.optimizers[0].state_dict())
        connector._loaded_checkpoint = state
        trainer.lightning_module.on_load_checkpoint(state)
        connector.restore_datamodule()
        connector.restore_callbacks()
        # The rest of it Lightning restores by itself when all callbacks have seen on_fit_start.


class _Placed:
    """A train loader whose batches begin where the run is; else it is the loader."""

    def __init__(self, callback: Preemptible, trainer: Trainer, loader: Any) -> None:
        vars(self).update(_own=(callback, trainer), _loader=loader)

    def __iter__(self) -> Iterator[Any]:
        callback, trainer = self._own
        batches: Iterator[Any] = callback.batches(trainer, self._loader)
        return batches

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # the run knows the place, of each rank
            raise AttributeError(name)
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)
