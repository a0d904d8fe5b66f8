"""Refuses a Trainer that a run cannot resume exactly, before it trains."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

from hpcddp.errors import UserError
from hpcddp.train.attach import written_down
from hpcddp.transformers.held_trainer import METHODS
from hpcddp.transformers.trainer_files import SAVES

NEEDED = (*METHODS, *SAVES, "store_flos", "save_model")


@written_down()
def refuse(trainer: Trainer, trial: Any) -> None:
    """Check a Trainer and its settings.

    Args:
        trial: of a search for hyperparameters.

    Raises:
        UserError: the run could not resume it exactly.
    """
    lacks = [name for name in NEEDED if not hasattr(trainer, name)]
    if lacks:
        raise UserError(
            f"unsupported version of transformers: its Trainer has no {lacks[0]}",
            where="Preemptible",
            hint="install transformers 5.23",
        )
    for applies, what, where, hint in _rows(trainer, trial):
        if applies:
            raise UserError(f"Preemptible does not support {what}", where=where, hint=hint)


def _rows(trainer: Trainer, trial: Any) -> list[tuple[bool, str, str, str]]:
    """Whether it applies, what is not supported and why, where, and what to do."""
    args, data = trainer.args, trainer.train_dataset
    accelerator = args.accelerator_config
    whole = "use DistributedDataParallel, the Trainer's default"
    own = "write the loop with Accelerate and hpcddp.attach"
    divided = getattr(trainer.accelerator, "parallelism_config", None) is not None
    stream = isinstance(data, IterableDataset) or not hasattr(data, "__len__")
    return [
        (
            trainer.is_deepspeed_enabled, "DeepSpeed, which saves the state itself",
            "TrainingArguments(deepspeed=...)", whole,
        ),
        (
            trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
            "FSDP under the Trainer, which divides the state over the ranks",
            "TrainingArguments(fsdp=...)", f"{whole}, or fully_shard with hpcddp.attach",
        ),
        (
            divided or getattr(trainer, "is_distributed_loading_by_transformers", False),
            "a model that is divided over the ranks", "Trainer(model=...)", whole,
        ),
        (
            stream, "a dataset without a length: the batches of a resume could differ",
            "Trainer(train_dataset=...)", f"give it a __len__ and a __getitem__, or {own}",
        ),
        (
            bool(accelerator.dispatch_batches),
            "dispatch_batches, where rank 0 reads for all ranks",
            "TrainingArguments(accelerator_config=...)", "leave it out",
        ),
        (
            args.ignore_data_skip, "ignore_data_skip, which repeats batches after a resume",
            "TrainingArguments(ignore_data_skip=...)", "leave it out",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size, which changes the batches during the training",
            "TrainingArguments(auto_find_batch_size=...)",
            "set per_device_train_batch_size to the size that fits",
        ),
        (
            args.enable_jit_checkpoint,
            "enable_jit_checkpoint, which ends a training at a stop as if it were complete",
            "TrainingArguments(enable_jit_checkpoint=...)",
            "leave it out: the run saves at the very step",
        ),
        (
            trial is not None or trainer.hp_search_backend is not None,
            "a search for hyperparameters", "Trainer.hyperparameter_search",
            "submit a run for each trial, as with `hpcddp submit --array`",
        ),
    ]  # fmt: skip
