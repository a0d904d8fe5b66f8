"""The callback, and its way into ``Trainer.train``.

A callback never sees its Trainer, and hears of a training when the Trainer has already decided
where it begins. So importing this module wraps ``Trainer.train``: a Trainer with the callback
starts there with its run.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hpcddp.errors import UserError
from hpcddp.train.loop import Run
from hpcddp.transformers.held_trainer import HeldTrainer
from hpcddp.transformers.unsupported import refuse

TIMES = ("epoch", "_runtime", "_per_second", "_preparation_time")  # no metrics of the model


class Preemptible(TrainerCallback):  # type: ignore[misc]
    """Callback that lets ``Trainer.train`` continue its run from the newest checkpoint.

    It supports one process without wrappers and DistributedDataParallel, a dataset with a length,
    and one call of ``Trainer.train`` in a run. The Trainer's own saves stay as they are.

    Args:
        save_every: Optimizer steps between two checkpoints; 0 saves only at a stop and at the end.
        keep: Number of newest checkpoints to keep.
        log_every: Optimizer steps between two records of the loss.

    Attributes:
        run (hpcddp.train.loop.Run | None): The run; None outside a job, and before
            ``Trainer.train``.

    Raises:
        UserError: ``Trainer.train`` was called a second time, or the Trainer's settings or the
            version of transformers are not supported.
    """

    def __init__(self, *, save_every: int = 500, keep: int = 2, log_every: int = 10) -> None:
        self.run: Run | None = None
        self._options = {"save_every": save_every, "keep": keep, "log_every": log_every}
        self._held: HeldTrainer | None = None

    def train(self, trainer: Trainer, resume: str | bool | None, **given: Any) -> Any:
        """``Trainer.train`` with the run; called by the wrapped method.

        Args:
            resume: the script's ``resume_from_checkpoint``, which counts until the run's first
                checkpoint.
            given: its other arguments.
        """
        attempt = os.environ["HPCDDP_RUN_DIR"], os.environ.get("HPCDDP_ATTEMPT", "1")
        if attempt in _attempts:
            raise UserError(
                "a run supports one call of Trainer.train, and this is another",
                where="Preemptible",
                hint="submit a run for each call, or remove the callback from the other Trainer",
            )
        _attempts.add(attempt)
        refuse(trainer)
        self._held = HeldTrainer(trainer, self._options)
        self.run = self._held.run
        with self._held:
            return _train(trainer, self._held.checkpoint or resume, **given)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Restore what the Trainer does not; called by the Trainer."""
        if self._held:
            self._held.begin()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Count the step, before its learning rate changes; called by the Trainer."""
        if self._held:
            self._held.step()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Record the metrics; called by the Trainer."""
        if self.run:
            values = given["metrics"].items()
            numbers = {n: v for n, v in values if isinstance(v, int | float)}
            self.run.log(**{n: v for n, v in numbers.items() if not n.endswith(TIMES)})


_attempts: set[tuple[str, str]] = set()  # those that this process has trained in
_train = Trainer.train


@functools.wraps(_train)
def _train_in_run(
    self: Trainer, resume_from_checkpoint: str | bool | None = None, *rest: Any, **given: Any
) -> Any:
    callbacks = self.callback_handler.callbacks
    callback = next((c for c in callbacks if isinstance(c, Preemptible)), None)
    if callback is None or "HPCDDP_RUN_DIR" not in os.environ:
        return _train(self, resume_from_checkpoint, *rest, **given)
    names = ("trial", "ignore_keys_for_eval")
    return callback.train(
        self, resume_from_checkpoint, **dict(zip(names, rest, strict=False)), **given
    )


Trainer.train = _train_in_run
