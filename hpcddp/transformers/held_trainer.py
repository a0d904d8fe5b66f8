"""A Trainer whose loop a run watches, saves and resumes, by its methods.

The methods are replaced on the one object while it trains. ``METHODS`` and ``SUMS`` are all that is
used of the Trainer beyond its documented attributes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from hpcddp.train.attach import attach_framework
from hpcddp.train.input import loaders
from hpcddp.train.input.read_ahead import ReadAhead
from hpcddp.transformers.trainer_files import TrainerFiles

# Methods that are replaced while it trains.
METHODS = (
    "set_initial_training_values", "get_eval_dataloader", "get_batch_samples", "training_step",
    "_init_training_state", "_run_epoch", "_load_rng_state", "_finalize_training",
)  # fmt: skip
# Plain numbers that the Trainer logs from, and does not save.
SUMS = (
    "_total_loss_scalar", "_globalstep_last_logged",
    "_initial_global_step", "_initial_num_input_tokens_seen",
)  # fmt: skip


class HeldTrainer:
    """One call of ``Trainer.train``. All ranks make it together.

    Args:
        options: save_every, keep and log_every, as for ``attach``.

    Raises:
        CheckpointForeign: the run's checkpoint is not the Trainer's.
    """

    def __init__(self, trainer: Trainer, options: dict[str, Any]) -> None:
        self._trainer, args = trainer, trainer.args
        self._files = TrainerFiles(trainer, self._own)
        device = torch.device("cpu") if args.device.type == "cpu" else args.device
        self.run, self._live = attach_framework(
            trainer.model, self._files, device, bool(args.torch_compile), **options
        )
        self._saved = dict(self.run.state.get("transformers") or {})
        self._rank_state = self._files.load()
        self._losses: list[Tensor] = []  # of the micro-batches since the last step
        self._loader: Any = None
        self._ahead: ReadAhead | None = None
        self._began = 0.0
        self._iterator: Any = None  # of the epoch
        self._epoch, self._used = 0, 0  # batches of the epoch, on each rank
        self._in_epoch = 0  # all of them
        self._replays = False  # ReadAhead restores the random numbers of this epoch

    @property
    def checkpoint(self) -> str | None:
        """The folder that the Trainer must resume from."""
        return str(self._files.resumed) if self._files.resumed else None

    def __enter__(self) -> HeldTrainer:
        self._attributes = dict(vars(self._trainer))
        self._originals = {name: getattr(self._trainer, name) for name in METHODS}
        for name in METHODS:
            setattr(self._trainer, name, getattr(self, "_on_" + name.lstrip("_")))
        self._eval_on_start = self._trainer.args.eval_on_start
        if self.checkpoint:  # an earlier attempt has
            self._trainer.args.eval_on_start = False
        return self

    def __exit__(self, *_: object) -> None:
        for name in METHODS:
            delattr(self._trainer, name)
            if name in self._attributes:
                setattr(self._trainer, name, self._attributes[name])
        self._trainer.args.eval_on_start = self._eval_on_start

    def _on_set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Hold the train loader. After a resume with other batches, count the steps anew."""
        self._loader = dataloader
        loaders.keep_workers(dataloader)
        self._ahead = ReadAhead(dataloader, self.run.world.device)
        *rest, in_epoch, most = self._originals["set_initial_training_values"](args, dataloader)
        if self.checkpoint:
            self._epoch, self._used = self.run.epoch, self._resumed_batches()
            if args.max_steps <= 0 and self._saved["batch"] != self._batch():
                before = self._epoch * rest[1] + self._used // args.gradient_accumulation_steps
                most = self._saved["step"] + max(0, most - before)
        return *rest, in_epoch, most

    def _batch(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        args = self._trainer.args
        size = loaders.batch_size(self._loader) * self.run.world.size
        return int(size * args.gradient_accumulation_steps)

    def _resumed_batches(self) -> int:
        """Used batches of the epoch, as whole steps."""
        used, each = self.run.used(self._loader), self._trainer.args.gradient_accumulation_steps
        return int(used // each * each)

    def _on_init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, *rest: Any
    ) -> tuple[int, int]:
        """The epoch and its used batches: the Trainer guesses them from the number of steps."""
        state = self._originals["_init_training_state"](max_steps, per_epoch, epochs, *rest)
        if not self.checkpoint:
            return state  # type: ignore[no-any-return]
        ended = self._saved["ended"]
        if ended == "early" or (ended and self._saved["step"] >= max_steps):
            return epochs, 0  # else the script has more epochs than before
        return self._epoch, self._used

    def _on_get_eval_dataloader(self, *args: Any, **options: Any) -> Any:
        loader = self._originals["get_eval_dataloader"](*args, **options)
        loaders.keep_workers(loader)
        return loader

    def begin(self) -> None:
        """Restore what the Trainer does not, when all its objects exist."""
        trainer = self._trainer
        self._live.optimizer = trainer.optimizer
        self._began = time.monotonic()
        if not self.checkpoint:
            return
        lacks = set() if self._rank_state else {"_globalstep_last_logged"}  # and the losses since
        for name in set(SUMS) - lacks:
            setattr(trainer, name, self._saved["sums"][name])
        if self._rank_state:
            trainer._tr_loss += self._rank_state["loss"].to(trainer._tr_loss.device)
        self._restore_callbacks()

    def _restore_callbacks(self) -> None:
        """Set the state of the callbacks that have one, in place."""
        for name, states in self._trainer.state.stateful_callbacks.items():
            own = [c for c in self._trainer.callback_handler.callbacks if type(c).__name__ == name]
            states = states if isinstance(states, list) else [states]
            for callback, state in zip(own, states, strict=False):
                for attribute, value in state.get("attributes", {}).items():
                    setattr(callback, attribute, value)

    def _on_run_epoch(self, **given: Any) -> None:
        """Note which epoch begins, and where."""
        epoch, resumed = given["epoch"], given["resume_from_checkpoint"] is not None
        first = resumed and epoch == given["epochs_trained"]
        self._epoch = epoch
        self._used = given["steps_trained_in_current_epoch"] if first else 0
        self._iterator, self._replays, self._in_epoch = None, False, given["steps_in_epoch"]
        given["start_time"] -= self._before
        self._originals["_run_epoch"](**given)

    @property
    def _before(self) -> float:
        """Seconds of training in earlier attempts."""
        return float(self._saved["seconds"]) if self.checkpoint else 0.0

    def _on_get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        """Save or stop between two steps, then read the batches of the next one."""
        assert self._ahead
        self._keep()
        self.run.at(self._epoch, self._used, self._loader)
        batches = self.run.between(epoch_iterator)
        starts = self._iterator is not epoch_iterator
        if starts:
            self._iterator = epoch_iterator
            if self._rank_state:
                self._ahead.resume(self._rank_state["random"], self._used)
                self._replays = True
            self._ahead.begin(self._epoch)
        with loaders.forking(self._loader):
            samples = self._originals["get_batch_samples"](batches, num_batches, device)
        if starts:
            self._ahead.go_on()
            self._rank_state = {}
        return samples

    def _on_load_rng_state(self, checkpoint: str | None) -> None:
        """Load the state of the save, unless ``ReadAhead`` has."""
        if not self._replays:
            self._originals["_load_rng_state"](checkpoint)

    def _on_training_step(self, *args: Any, **options: Any) -> Tensor:
        loss: Tensor = self._originals["training_step"](*args, **options)
        self._losses.append(loss.detach())
        return loss

    def step(self) -> None:
        """Count an optimizer step."""
        seen = len(self._losses)
        self._used += seen
        self.run.at(self._epoch, self._used, self._loader, seen=seen)
        self.run.step(torch.stack(self._losses).sum() if seen else None)
        self._losses = []

    def _keep(self, ended: str = "") -> None:
        """Refresh the plain data of the next checkpoint.

        Args:
            ended: "early" or "late", once the training has ended.
        """
        self.run.state["transformers"] = {
            "sums": {name: getattr(self._trainer, name) for name in SUMS},
            "seconds": self._before + time.monotonic() - self._began,
            "batch": self._batch(),
            "step": self._trainer.state.global_step,
            "ended": ended,
        }

    def _own(self) -> dict[str, Any]:
        """This rank's part of a checkpoint, besides the Trainer's."""
        assert self._ahead
        return {"loss": self._trainer._tr_loss, "random": self._ahead.states(self._used)}

    def _on_finalize_training(self, trial: Any, samples: float, start_time: float) -> Any:
        """Save the last step, before the Trainer loads its best model."""
        state = self._trainer.state
        self._keep("early" if state.global_step < state.max_steps else "late")
        if self._in_epoch and self._used == self._in_epoch:
            self._epoch, self._used = self._epoch + 1, 0
        self.run.at(self._epoch, self._used, self._loader)
        self.run.finish()
        return self._originals["_finalize_training"](trial, samples, start_time - self._before)
