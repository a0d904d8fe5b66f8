"""A callback that saves and resumes a Lightning Trainer with its run.

It is for Lightning what ``hpcddp.attach`` is for your own training loop::

    from hpcddp.lightning import Preemptible

    trainer = lightning.Trainer(..., callbacks=[Preemptible()])

The run's checkpoints contain the weights and the first optimizer, as for any loop, and beside them
the rest of Lightning's own checkpoint. The run saves and stops between two batches of the train
loader, when Lightning has completed a step. It resumes at the exact batch. Outside a job the
callback does nothing.
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

# The same package has two names: use the one that the script uses.
if TYPE_CHECKING or ("pytorch_lightning" not in sys.modules and find_spec("lightning")):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
else:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy


# Undocumented attributes of Lightning's loops that a resume needs.
LOOP = ("restarted_mid_epoch", "on_iteration_done", "_data_fetcher", "_combined_loader")
EPOCH_LOOP = ("reset_restart_stage", "batch_progress")


class Preemptible(Callback):
    """Callback that lets ``Trainer.fit`` continue its run from the newest checkpoint.

    It supports ``strategy="ddp"`` and single devices, one train loader, and one call of
    ``Trainer.fit`` in a run. In a job it turns off Lightning's own signal handlers and requeueing.

    Args:
        save_every: Optimizer steps between two checkpoints; 0 saves only at a stop and at the end.
        keep: Number of newest checkpoints to keep.
        log_every: Optimizer steps between two records of the metrics.

    Attributes:
        run (hpcddp.train.loop.Run | None): The run; None outside a job, and before ``Trainer.fit``.

    Raises:
        UserError: ``Trainer.fit`` was called a second time, the strategy or the number of train
            loaders is not supported, or the version of Lightning is not.
    """

    def __init__(self, *, save_every: int = 100, keep: int = 2, log_every: int = 10) -> None:
        self.run: Run | None = None
        options = {"save_every": save_every, "keep": keep, "log_every": log_every}
        self._options: dict[str, Any] = options
        self._steps = 0  # Lightning's count of steps at the last check
        self._loader: Any = None
        self._counters: dict[str, Any] = {}  # of an epoch that an earlier attempt started

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's signal handlers and wrap its train loader; called by Lightning."""
        if stage != "fit" or "HPCDDP_RUN_DIR" not in os.environ:
            return
        if self.run:
            raise UserError(
                "a run supports one call of Trainer.fit, and this is another",
                where="Preemptible",
                hint="submit a run for each call, or remove the callback from the other Trainer",
            )
        _check_loops(trainer)
        # Lightning's handlers communicate with other ranks inside a signal handler, end a run as if
        # it were complete, and requeue a Slurm job themselves.
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        process = trainer.strategy.process_dataloader

        def placed(dataloader: object) -> object:
            loader = process(dataloader)
            return _Placed(self, trainer, loader) if trainer.training else loader

        trainer.strategy.process_dataloader = placed  # type: ignore[method-assign]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the run and restore its newest checkpoint; called by Lightning."""
        if "HPCDDP_RUN_DIR" not in os.environ:
            return
        model, first = _checked(trainer), trainer.optimizers[0]
        self._rest = _Rest(trainer)
        self.run = attach(model, first, more=self._rest, **self._options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's loop as a new one: Lightning's own resume only guesses the position."""
        self._steps, loop = trainer.global_step, trainer.fit_loop
        if self.run:  # a schedule may need metrics of a validation before the stop
            trainer._logger_connector._callback_metrics.update(self._rest.metrics)
        assert loop._combined_loader is not None  # it has a len(), which may fail
        loaders = len(loop._combined_loader.flattened)
        if self.run and loaders > 1:
            raise UserError(
                f"expected 1 train loader, got {loaders}",
                where="Preemptible",
                hint="combine their datasets in one loader",
            )
        if self.run and self.run.resumed and loop.restarted_mid_epoch:
            self._counters = loop.epoch_loop.state_dict()
            loop.epoch_loop.restarting = False
            loop.epoch_loop.reset_restart_stage()

    def batches(self, trainer: Trainer, loader: Any) -> Iterator[Any]:
        """The batches of Lightning's epoch that the run has not trained on yet."""
        assert self.run
        self._loader = loader
        if trainer.current_epoch != self.run.epoch:
            self.run.at(trainer.current_epoch, 0, loader)
        used = self.run.used(loader)
        for batch in self.run.batches(loader):
            if self._counters:
                self._count_on(trainer, used)
            yield batch
        if self._counters:  # the last batch was read ahead, before the epoch's loop started
            self._count_on(trainer, used)

    def _count_on(self, trainer: Trainer, used: int) -> None:
        """Restore the loops' counters, at the same point of the loop where they were saved.

        Args:
            used: used batches of the epoch. Differs from the saved number after a resume on another
                number of ranks.
        """
        loop, counters = trainer.fit_loop, self._counters
        self._counters = {}
        loop.epoch_loop.load_state_dict(counters)
        loop.epoch_loop.restarting = False
        loop.on_iteration_done()  # later epochs are not restarted
        loop.epoch_loop.batch_progress.current.load_state_dict(
            dict.fromkeys(("ready", "started", "processed", "completed"), used)
        )
        assert loop._data_fetcher
        loop._data_fetcher.fetched = used

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, and save or stop if it is time; called by Lightning."""
        if self.run is None or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        used = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self.run.at(trainer.current_epoch, used, self._loader)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.run.step(loss if isinstance(loss, Tensor) else None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of the training; called by Lightning."""
        if self.run:
            self.run.finish()


def _check_loops(trainer: Trainer) -> None:
    """Refuse an unsupported version of Lightning at the start, not at the first resume."""
    loop = trainer.fit_loop
    lacks = [name for name in LOOP if not hasattr(loop, name)]
    lacks += [name for name in EPOCH_LOOP if not hasattr(loop.epoch_loop, name)]
    if lacks:
        raise UserError(
            f"unsupported version of Lightning: its loops have no {lacks[0]}",
            where="Preemptible",
            hint="install Lightning 2.6",
        )


def _checked(trainer: Trainer) -> Module:
    """The strategy's model.

    Raises:
        UserError: the strategy shards the model, or is not known.
    """
    model, strategy = trainer.strategy.model, trainer.strategy
    whole = model is trainer.lightning_module or isinstance(model, DistributedDataParallel)
    if model is not None and whole and isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        return model
    raise UserError(
        f"Preemptible does not support {type(strategy).__name__}",
        where="Trainer(strategy=...)",
        hint='use strategy="ddp" or a single device',
    )


class _Rest:
    """Lightning's state besides the weights and the first optimizer: loops, callbacks, schedulers,
    further optimizers, loss scaling, the data module, and additions of hooks."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.metrics: dict[str, Tensor] = {}  # the last logged values at the time of the save

    def state_dict(self) -> dict[str, Any]:
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        del checkpoint["state_dict"], checkpoint["optimizer_states"][0]
        # Hyperparameters come from the script, in every attempt.
        hparams = ("hyper_parameters", "hparams_name", "hparams_type")
        kept = {name: value for name, value in checkpoint.items() if not name.endswith(hparams)}
        metrics = {n: v.detach().clone() for n, v in self._trainer.callback_metrics.items()}
        return {**kept, "should_stop": self._trainer.should_stop, "metrics": metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state as the checkpoint that Lightning restores from.

        So the script's ``ckpt_path`` is used only until the run's first checkpoint.
        """
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        trainer.should_stop = state.pop("should_stop")
        self.metrics = state.pop("metrics")
        state["state_dict"] = trainer.lightning_module.state_dict()
        state["optimizer_states"].insert(0, trainer.optimizers[0].state_dict())
        connector._loaded_checkpoint = state
        trainer.lightning_module.on_load_checkpoint(state)
        connector.restore_datamodule()
        connector.restore_callbacks()
        # Lightning restores the rest itself, after on_fit_start of all callbacks.


class _Placed:
    """A train loader that starts at the run's position. All other attributes are the loader's."""

    def __init__(self, callback: Preemptible, trainer: Trainer, loader: Any) -> None:
        vars(self).update(_own=(callback, trainer), _loader=loader)

    def __iter__(self) -> Iterator[Any]:
        callback, trainer = self._own
        batches: Iterator[Any] = callback.batches(trainer, self._loader)
        return batches

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # the run restores the position of each rank
            raise AttributeError(name)
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)
