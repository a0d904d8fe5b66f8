"""How a person's own loop gets hold of its run: ``hpcddp.attach`` and ``hpcddp.init``."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
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
from hpcddp.preempt import Preemption, ignore_stop_signals
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank
from hpcddp.train import job as jobs
from hpcddp.train.checkpoint import newest
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.snapshot import Live
from hpcddp.train.loop import Run
from hpcddp.train.meter import Meter
from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.parallel import model as models
from hpcddp.train.rank import world as worlds
from hpcddp.train.rank.spread import replicas
from hpcddp.train.rank.world import World
from hpcddp.train.session import Session

_Spec = dict[str, dict[str, Any]]  # the sections of a job that a loop of one's own heeds


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


def _meet(module: nn.Module) -> World:
    """The ranks that the script has brought together, or brings together here."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    with _written_down():
        world = worlds.adopt(device) if dist.is_initialized() else init()
    atexit.register(gloo.rest)
    return world


def _session(
    world: World, run: RunDir, spec: _Spec, clock: Clock, preemption: Preemption
) -> Session:
    """Take the run dir over, and choose the checkpoint to go on from; a collective."""
    meter, attempt = Meter(world, clock), int(os.environ.get("HPCDDP_ATTEMPT", "1"))
    lease = Lease(run, attempt)
    record = Recorder(run.attempt(attempt), active=world.is_main, lease=lease)
    lease.take(world)
    preemption.install()
    # Python takes its handlers away before it has ended, and a signal may come after that.
    atexit.register(ignore_stop_signals)
    record("ranks", backend=world.backend, ranks=world.reports)
    retry = DiskRetry(world)
    saved = newest.find(run, retry)
    return Session(
        lease, replicas(world), record, meter, retry, saved,
        slow=spec["metrics"].get("slow", 1.5), trace=bool(spec["train"].get("trace")),
    )  # fmt: skip


def _run(world: World, live: Live, compiled: bool, **options: Any) -> Run:
    """The loop's hold on its run; a collective.

    Args:
        compiled: torch.compile is around the model.
        options: those of ``attach``.
    """
    folder, preemption, session = os.environ.get("HPCDDP_RUN_DIR"), Preemption(), None
    job = records.read(RunDir(folder)).spec if folder else {}
    spec: _Spec = {name: job.get(name, {}) for name in ("train", "metrics")}
    clock = Clock(world.device, whole=spec["metrics"].get("ranks", True))
    if not folder and world.is_main:
        print("hpcddp: not in a job: nothing is saved, and nothing stops", file=sys.stderr)
    if folder and not compiled:  # a compiled model has no place for a clock
        clock.watch([live.module])
    try:
        if folder:
            session = _session(world, RunDir(folder), spec, clock, preemption)
        return Run(world, live, clock, preemption, session, **options)
    except CheckpointError as error:  # on all ranks
        attempt = RunDir(folder or "").attempt(int(os.environ.get("HPCDDP_ATTEMPT", "1")))
        error_record.report(error, attempt, world.rank.world_rank)
        raise


def attach(
    model: nn.Module, optimizer: Optimizer, *,
    scheduler: Any = None, scaler: Any = None, more: Any = None,
    save_every: int = 100, keep: int = 2, log_every: int = 10, leave: bool = True,
) -> Run:  # fmt: skip
    """Let a loop go on with its run: the newest checkpoint is put into model and optimizer.

    Args:
        model: under DistributedDataParallel or plain; checkpoints have the plain names.
        scheduler, scaler: saved too, where the loop has them.
        more: another object with state_dict and load_state_dict, such as an average of the weights.
            Its state is tensors and plain data. Rank 0's is saved, and all ranks get it.
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
    world = _meet(module)
    if wrapper:
        models.settle_buckets(wrapper)
    live = Live(module, _innermost(optimizer), scheduler or _Nothing(), scaler or _Nothing(), more)
    return _run(
        world, live, compiled,
        save_every=save_every, keep=keep, log_every=log_every, leave=leave,
    )  # fmt: skip
