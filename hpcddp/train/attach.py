"""Connects a user's own training loop with its run: ``hpcddp.attach`` and ``hpcddp.init``."""

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
from hpcddp.attempt.link import slots
from hpcddp.attempt.rank_exit import share_failure
from hpcddp.errors import (
    CheckpointError,
    HpcddpError,
    NodeUnfit,
    RankMapError,
    TopologyError,
    UserError,
)
from hpcddp.preempt import Preemption, ignore_stop_signals
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank
from hpcddp.train import job as jobs
from hpcddp.train.checkpoint import newest
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.snapshot import FrameworkFiles, Live
from hpcddp.train.loop import Run
from hpcddp.train.meter import Meter
from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.own_session import OwnSession
from hpcddp.train.parallel import model as models
from hpcddp.train.rank import node_speed
from hpcddp.train.rank import world as worlds
from hpcddp.train.rank.spread import replicas
from hpcddp.train.rank.world import World

_Spec = dict[str, dict[str, Any]]  # the sections of a job that apply to a user's own loop


class _Nothing:
    """Stands for a missing schedule or scaler."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def is_enabled(self) -> bool:
        return False


@contextlib.contextmanager
def written_down() -> Iterator[None]:
    """Record an error that keeps the ranks from starting: the host at fault, or a user error that
    all ranks share."""
    try:
        yield
    except (RankMapError, NodeUnfit, CheckpointError, UserError) as error:
        if folder := os.environ.get("HPCDDP_RUN_DIR"):
            with contextlib.suppress(TopologyError):  # the variables of the rank are the error
                _write_down(error, RunDir(folder), Rank.from_env(os.environ))
        raise


def _write_down(error: HpcddpError, run: RunDir, rank: Rank) -> None:
    attempt = run.attempt(int(os.environ.get("HPCDDP_ATTEMPT", "1")))
    who: int | None = rank.world_rank
    if error.kind == "mistake":
        share_failure(error, attempt, rank.world_rank, rank.world_size)
        who = None if error_record.is_shared(attempt) else who
    error_record.report(error, attempt, who, stepped=False)


@written_down()
def init() -> World:
    """Start the process group, in place of ``torch.distributed.init_process_group``: with NCCL on
    GPUs, else with gloo.

    Returns: ``rank`` (with ``world_rank`` and ``local_rank``), ``size`` and ``device``.

    Raises:
        RankMapError: a rank is wrong, duplicated or missing, has lost its GPU or shares it; the
            message names the rank.
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
    """The model inside of DDP and torch.compile, the DDP wrapper if there is one, and whether the
    model is compiled."""
    wrapper, compiled = None, False
    while True:
        if isinstance(model, DistributedDataParallel):
            wrapper, model = model, model.module
        elif hasattr(model, "_orig_mod"):
            model, compiled = model._orig_mod, True
        else:
            return model, wrapper, compiled


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of Accelerate's wrapper."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _check(module: nn.Module) -> None:
    """Refuse models that a checkpoint cannot hold.

    Raises:
        UserError: the model has one of FSDP's old wrappers, or has no values yet.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # its import takes a second
    # The old wrapper keeps its state in flat tensors, not in the module's own.
    if fsdp and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in module.modules()):
        raise UserError(
            "FullyShardedDataParallel is not supported",
            where="hpcddp.attach",
            hint="divide the model with torch.distributed.fsdp.fully_shard",
        )
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if meta := next((name for name, tensor in tensors if tensor.is_meta), ""):
        raise UserError(
            f"{meta} is on the meta device and has no values",
            where="hpcddp.attach",
            hint="call model.to_empty(device=...) and initialize the weights before attach",
        )


def _device(module: nn.Module) -> torch.device:
    """The device that the script trains on, which is not where fully_shard offloads to."""
    parameter = next(module.parameters(), torch.empty(0))
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def _meet(device: torch.device) -> World:
    """The world of the script's process group; without a group, ``init`` starts it."""
    world = worlds.adopt(device) if dist.is_initialized() else init()
    atexit.register(gloo.rest)
    return world


def _session(
    world: World,
    run: RunDir,
    spec: _Spec,
    clock: Clock,
    preemption: Preemption,
    module: nn.Module,
    preflight: str,
) -> OwnSession:
    """Take the lease of the run folder, and choose the checkpoint to resume from; a collective."""
    meter, attempt = Meter(world, clock), int(os.environ.get("HPCDDP_ATTEMPT", "1"))
    lease = Lease(run, attempt)
    record = Recorder(run.attempt(attempt), active=world.is_main, lease=lease)
    lease.take(world)
    preemption.install()
    # Python removes its handlers before the process ends, and a signal may arrive after that.
    atexit.register(ignore_stop_signals)
    record("ranks", backend=world.backend, ranks=world.reports)
    node_speed.check(world, run, attempt, preflight, record)
    retry = DiskRetry(world)
    saved = newest.find(run, retry)
    return OwnSession(
        lease, replicas(world, module), record, meter, retry, saved,
        slot=slots.own_slot(os.environ), slow=spec["metrics"].get("slow", 1.5),
        trace=bool(spec["train"].get("trace")),
    )  # fmt: skip


def _run(world: World, live: Live, compiled: bool, **options: Any) -> Run:
    """The loop's ``Run``; a collective.

    Args:
        compiled: the model is wrapped by torch.compile.
        options: those of ``attach``.
    """
    folder, preemption, session = os.environ.get("HPCDDP_RUN_DIR"), Preemption(), None
    job = records.read(RunDir(folder)).spec if folder else {}
    spec: _Spec = {name: job.get(name, {}) for name in ("train", "metrics")}
    clock = Clock(world.device, whole=spec["metrics"].get("ranks", True))
    if not folder and world.is_main:
        print("hpcddp: not in a job: checkpoints and stop requests are off", file=sys.stderr)
    if folder and not compiled:  # the clock's hooks do not run inside of a compiled model
        clock.watch([live.module])
    if folder:
        session = _session(world, RunDir(folder), spec, clock, preemption, live.module,
                           job.get("preflight", "light"))  # fmt: skip
    return Run(world, live, clock, preemption, session, **options)


@written_down()
def attach(
    model: nn.Module, optimizer: Optimizer, *,
    scheduler: Any = None, scaler: Any = None, more: Any = None,
    save_every: int = 100, keep: int = 2, log_every: int = 10, leave: bool = True,
) -> Run:  # fmt: skip
    """Connect a training loop with its run: load the newest checkpoint into model and optimizer,
    and save new ones. All ranks call it together, after the model is wrapped or divided.

    Args:
        model: plain, under DistributedDataParallel, or divided by ``fully_shard``. A parameter is
            the same on all ranks, or a DTensor. Of buffers, rank 0's are saved.
        optimizer: of the model's parameters, made after ``fully_shard``.
        scheduler, scaler: saved and loaded too, if given.
        more: another object with state_dict and load_state_dict, such as an average of the weights.
            Its state must be tensors and plain data. Rank 0's is saved, and all ranks load it.
        save_every: steps between two checkpoints; 0 saves only at a stop and at the end.
        keep: number of checkpoints to keep, the newest.
        log_every: steps between two records.
        leave: end the process after the save at a stop; otherwise ``batches`` and ``epochs`` end,
            and ``Run.stopped`` is True.

    Raises:
        CheckpointForeign: the checkpoint is of another model; the run is not requeued.
        UserError: the model or the optimizer is divided in an unsupported way.
        LeaseLost: a newer attempt owns the run folder.
    """
    module, wrapper, compiled = _unwrapped(model)
    _check(module)
    world = _meet(_device(module))
    if wrapper:
        models.settle_buckets(wrapper)
    live = Live(module, _innermost(optimizer), scheduler or _Nothing(), scaler or _Nothing(), more,
                wrapper=wrapper)  # fmt: skip
    return _run(
        world, live, compiled,
        save_every=save_every, keep=keep, log_every=log_every, leave=leave,
    )  # fmt: skip


@written_down()
def attach_framework(
    model: nn.Module, files: FrameworkFiles, device: torch.device, compiled: bool, **options: Any
) -> tuple[Run, Live]:
    """Connect a framework's own loop with its run; a collective.

    Args:
        model: without wrappers.
        files: write the state into checkpoints, and learn which one the framework must load.
        device: the one that this rank trains on.
        compiled: the framework compiles the model.
        options: save_every, keep and log_every, as for ``attach``.

    Returns: also the objects of the run. The framework replaces the optimizer when it has made it.

    Raises:
        CheckpointForeign: the checkpoint is in another format.
        LeaseLost: a newer attempt owns the run folder.
    """
    none = torch.optim.SGD([torch.empty(0)])
    live = Live(model, none, _Nothing(), _Nothing(), files=files)
    return _run(_meet(device), live, compiled, leave=True, **options), live
