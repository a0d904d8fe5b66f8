"""Refuses a Trainer that a run cannot resume exactly, before it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from transformers import Trainer

from hpcddp.errors import UserError
from hpcddp.train.attach import written_down
from hpcddp.transformers.held_trainer import METHODS
from hpcddp.transformers.trainer_files import SAVES

NEEDED = (*METHODS, *SAVES, "store_flos", "save_model")
WHOLE = "use DistributedDataParallel, the Trainer's default"


class Refusal(NamedTuple):
    """Something that is not supported, and why."""

    applies: Callable[[Trainer], Any]
    what: str
    where: str
    hint: str


def _divided(trainer: Trainer) -> bool:
    parallel = getattr(trainer.accelerator, "parallelism_config", None) is not None
    return parallel or getattr(trainer, "is_distributed_loading_by_transformers", False)


def _endless(trainer: Trainer) -> bool:
    data = trainer.train_dataset
    return isinstance(data, IterableDataset) or not hasattr(data, "__len__")


REFUSALS = (
    Refusal(
        lambda trainer: trainer.is_deepspeed_enabled,
        "DeepSpeed, which saves the state itself",
        "TrainingArguments(deepspeed=...)",
        WHOLE,
    ),
    Refusal(
        lambda trainer: trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "FSDP under the Trainer, which divides the state over the ranks",
        "TrainingArguments(fsdp=...)",
        f"{WHOLE}, or fully_shard with hpcddp.attach",
    ),
    Refusal(_divided, "a model that is divided over the ranks", "Trainer(model=...)", WHOLE),
    Refusal(
        _endless,
        "a dataset without a length: the batches of a resume could differ",
        "Trainer(train_dataset=...)",
        "use one with __len__ and __getitem__, or a loop of your own with hpcddp.attach",
    ),
    Refusal(
        lambda trainer: trainer.args.accelerator_config.dispatch_batches,
        "dispatch_batches, where rank 0 reads for all ranks",
        "TrainingArguments(accelerator_config=...)",
        "leave it out",
    ),
    Refusal(
        lambda trainer: trainer.args.ignore_data_skip,
        "ignore_data_skip, which repeats batches after a resume",
        "TrainingArguments(ignore_data_skip=...)",
        "leave it out",
    ),
    Refusal(
        lambda trainer: trainer.args.auto_find_batch_size,
        "auto_find_batch_size, which changes the batches during the training",
        "TrainingArguments(auto_find_batch_size=...)",
        "set per_device_train_batch_size to the size that fits",
    ),
    Refusal(
        lambda trainer: trainer.args.enable_jit_checkpoint,
        "enable_jit_checkpoint, which ends a training at a stop as if it were complete",
        "TrainingArguments(enable_jit_checkpoint=...)",
        "leave it out: the run saves at the very step",
    ),
    Refusal(
        lambda trainer: trainer.hp_search_backend is not None,
        "a search for hyperparameters",
        "Trainer.hyperparameter_search",
        "submit a run for each trial",
    ),
)


@written_down()
def refuse(trainer: Trainer) -> None:
    """Check a Trainer and its settings.

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
    for row in REFUSALS:
        if row.applies(trainer):
            what = f"Preemptible does not support {row.what}"
            raise UserError(what, where=row.where, hint=row.hint)
