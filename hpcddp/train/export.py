"""A run's newest weights as one file that a plain model loads."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hpcddp.errors import CheckpointError, UserError
from hpcddp.rundir import RunDir
from hpcddp.train import checkpoint


def export(run: RunDir, target: Path) -> int:
    """Write {parameter name: tensor} of the newest complete checkpoint; no process group needed.

    ``model.load_state_dict(torch.load(target, weights_only=True))`` reads it.

    Returns: the checkpoint's step.

    Raises:
        CheckpointError: there is no complete, undamaged checkpoint.
        UserError: the target cannot be written.
    """
    from hpcddp.train import shards

    for folder in checkpoint.complete(run.checkpoints):
        if checkpoint.damage(folder):
            continue
        tensors = shards.empty(folder, "model.")
        shards.read(folder, tensors, None, alone=True)
        _write({name.removeprefix("model."): t for name, t in tensors.items()}, target)
        return checkpoint.step_of(folder) or 0
    raise CheckpointError(
        "there is no complete checkpoint",
        where=str(run.checkpoints),
        hint="the first one is saved after checkpoint.every steps, or at the end",
    )


def _write(tensors: dict[str, torch.Tensor], target: Path) -> None:
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        torch.save(tensors, aside)
        aside.replace(target)
    except (OSError, RuntimeError) as error:  # torch says a missing folder with RuntimeError
        aside.unlink(missing_ok=True)
        raise UserError(f"cannot be written: {error}", where=str(target)) from None
