"""Training state to a checkpoint and back: what is trained, where it is, and what it drew."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import hpcddp
from hpcddp.errors import CheckpointError
from hpcddp.train import checkpoint, optim, state
from hpcddp.train.lease import Lease
from hpcddp.train.world import World


@dataclass
class Position:
    """Where the training is: optimizer steps, complete epochs, samples of the epoch begun."""

    step: int = 0
    epoch: int = 0
    samples_consumed: int = 0


@dataclass
class Live:
    """What changes in training."""

    module: nn.Module
    optimizer: Optimizer
    scheduler: Any  # an LRScheduler, or what has its state_dict
    scaler: Any  # a GradScaler, likewise
    more: Any = None  # what else has a state_dict, of tensors and plain data


def meta(
    lease: Lease,
    world: World,
    live: Live,
    at: Position,
    facts: dict[str, Any],
    plain: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """What meta.json says, as plain data.

    Args:
        facts: more of it.
        plain: the numbers in the optimizer's state.
    """
    return {
        **vars(at),
        **facts,
        "run": lease.run.name,
        "attempt": lease.attempt,
        "world": world.size,
        "optimizer": {"param_groups": state.groups(live.optimizer), "state": plain},
        "scheduler": live.scheduler.state_dict(),
        "scaler": live.scaler.state_dict(),
        "versions": {
            "hpcddp": hpcddp.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def position(meta: dict[str, Any], where: Path) -> Position:
    """Where a checkpoint's training was."""
    try:
        return Position(*(int(meta[name]) for name in Position.__dataclass_fields__))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError("meta.json says no position", where=str(where)) from None


def restore(
    folder: Path,
    meta: dict[str, Any],
    world: World,
    live: Live,
    *,
    optimizer: bool = False,
    schedule: bool = False,
) -> None:
    """Put a checkpoint's state into the live objects; a collective.

    Where optimizer or schedule are a person's own, options come back as they were: a schedule sets
    the learning rate only when it steps. Ours follow from the job file and the step, so a value
    changed for the rest of the run counts. A rank that the checkpoint did not have keeps the random
    numbers that its seed gave it.

    Args:
        optimizer, schedule: whether it is a person's own.
    """
    from hpcddp.train import shards

    there = state.State(live.module, live.optimizer)
    there.only(checkpoint.check_names(folder, there.tensors))
    rng = shards.empty(folder, f"rng.{world.rank.world_rank}.")
    more = shards.empty(folder, state.MORE) if live.more else {}
    checkpoint.load(folder, {**there.tensors, **rng, **more}, world)
    there.apply(meta["optimizer"], options=optimizer or schedule)
    if schedule:
        live.scheduler.load_state_dict(state.like(meta["scheduler"], live.scheduler.state_dict()))
    elif isinstance(live.scheduler, LambdaLR):
        optim.go_to_step(live.scheduler, meta["step"])
    if live.scaler.is_enabled() and meta["scaler"]:
        live.scaler.load_state_dict(meta["scaler"])
    if more:
        live.more.load_state_dict(state.unpack(more))
    if rng:
        state.set_rng(rng, world.device)
