"""How a person's own loop gets hold of its run: ``hpcddp.attach`` and ``hpcddp.init``."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcddp import gloo
from hpcddp import record as records
from hpcddp.attempt import error_record
from hpcddp.errors import CheckpointError, RankMapError
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank
from hpcddp.train import job as jobs
from hpcddp.train.checkpoint.snapshot import Live
from hpcddp.train.loop import Run
from hpcddp.train.parallel import model as models
from hpcddp.train.rank import world as worlds
from hpcddp.train.rank.world import World


class _Nothing:
    """Stands for a schedule or a scaler that a loop has not."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def is_enabled(self) -> bool:
        return False


@contextlib.contextmanager
def _written_down() -> Iterator[None]:
    """Have the run know which host is to blame where the ranks cannot begin together."""
    try:
        yield
    except RankMapError as error:
        if folder := os.environ.get("HPCDDP_RUN_DIR"):
            attempt = RunDir(folder).attempt(int(os.environ.get("HPCDDP_ATTEMPT", "1")))
            rank = Rank.from_env(os.environ).world_rank
            error_record.report(error, attempt, rank, stepped=False)
        raise


@_written_down()
def init() -> World:
    """Meet the other ranks and start the process group, NCCL where there are GPUs and else gloo: in
    place of ``torch.distributed.init_process_group``. Its result has rank and device.

    Raises:
        RankMapError: a rank is wrong, doubled or missing, has lost its GPU or shares it; it is
            named.
    """
    rank, folder = Rank.from_env(os.environ), os.environ.get("HPCDDP_RUN_DIR")
    if folder:
        world = jobs.join(rank, records.read(RunDir(folder)), os.environ)
    else:
        nodes, size = rank.world_size // rank.local_size, rank.local_size
        port = int(os.environ.get("MASTER_PORT", "29500"))
        address = os.environ.get("MASTER_ADDR", "127.0.0.1"), port
        world = worlds.join(rank, (nodes, nodes), size, local=nodes == 1, address=address)
    world.connect()
    return world


def _unwrapped(model: Any) -> tuple[nn.Module, DistributedDataParallel | None, bool]:
    """A model without what DDP and torch.compile put around it, the DDP there was, and whether it
    is compiled."""
    wrapper, compiled = None, False
    while True:
        if isinstance(model, DistributedDataParallel):
            wrapper, model = model, model.module
        elif hasattr(model, "_orig_mod"):
            model, compiled = model._orig_mod, True
        else:
            return model, wrapper, compiled


def _innermost(optimizer: Optimizer) -> Optimizer:
    """An optimizer without what Accelerate puts around it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    more: Any = None,
    save_every: int = 100,
    keep: int = 2,
    log_every: int = 10,
    leave: bool = True,
) -> Run:
    """Let a loop go on with its run: the newest checkpoint is put into model and optimizer.

    Args:
        model: under DistributedDataParallel or plain; checkpoints have the plain names.
        scheduler, scaler: what else is saved, where the loop has it.
        more: what else has state_dict and load_state_dict: an average of the weights, say. It is of
            tensors and plain data, rank 0's is saved, and all ranks get it.
        save_every: steps between two checkpoints; 0 saves only when it stops or ends.
        keep: newest checkpoints that are kept.
        log_every: steps between two records.
        leave: end the process when all have saved for a stop; else ``batches`` and ``epochs`` end,
            and ``Run.stopped`` is True.

    Raises:
        CheckpointForeign: the checkpoint is of another model; written down, as it would come again.
        LeaseLost: a newer attempt owns the run dir.
    """
    module, wrapper, compiled = _unwrapped(model)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    with _written_down():
        world = worlds.adopt(device) if dist.is_initialized() else init()
    atexit.register(gloo.rest)
    folder = os.environ.get("HPCDDP_RUN_DIR")
    if not folder and world.is_main:
        print("hpcddp: not in a job: nothing is saved, and nothing stops", file=sys.stderr)
    if wrapper:
        models.settle_buckets(wrapper)
    live = Live(module, _innermost(optimizer), scheduler or _Nothing(), scaler or _Nothing(), more)
    try:
        return Run(
            world, live, Path(folder) if folder else None,
            save_every=save_every, keep=keep, log_every=log_every, leave=leave,
            compiled=compiled,
        )  # fmt: skip
    except CheckpointError as error:  # on all ranks
        attempt = RunDir(folder or "").attempt(int(os.environ.get("HPCDDP_ATTEMPT", "1")))
        error_record.report(error, attempt, world.rank.world_rank)
        raise
