"""One rank, from reading the run folder to the end of its training."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from threading import Thread

from hpcddp import rank_results, versions
from hpcddp import record as record_
from hpcddp import spec as jobspec
from hpcddp.attempt import ledger
from hpcddp.attempt.error_record import host
from hpcddp.attempt.link.slots import Slot
from hpcddp.errors import Diverged, RunUnreadable
from hpcddp.preempt import Preemption
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, write_json
from hpcddp.spec import JobSpec
from hpcddp.topology import Rank
from hpcddp.train import arrival
from hpcddp.train.checkpoint import disk_retry
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.monitor.heartbeat import Heartbeat, outlast
from hpcddp.train.monitor.metrics import OnRecord, Recorder
from hpcddp.train.monitor.watchdog import watching
from hpcddp.train.rank import node_speed
from hpcddp.train.rank import task_module as tasks
from hpcddp.train.rank import world as worlds
from hpcddp.train.rank.world import World
from hpcddp.train.trainer import Trainer

READ = 60.0  # seconds of retries if a run cannot be read
START_TIMEOUT = 600.0  # seconds; a thousand ranks that import torch from one file server are slow


def train(
    run: RunDir,
    rank: Rank,
    attempt: int,
    preemption: Preemption,
    max_steps: int | None = None,
    on_record: OnRecord | None = None,
    *,
    met: Callable[[], object] | None = None,
    heartbeat: Heartbeat | None = None,
    on_hang: Callable[[], object] | None = None,
) -> str:
    """Train as one rank; "done" or "stopped". No rank returns before all ranks have saved.

    Args:
        met: called when this rank knows that all ranks have reached the rendezvous.
        heartbeat: counts the progress.
        on_hang: ends the process at a hang; None to not look for hangs.

    Raises:
        LeaseLost: on all ranks, if a newer attempt owns the run folder.
    """
    job = disk_retry.alone(lambda: _read(run), READ)
    spec = jobspec.from_dict(job.spec, str(run.job))
    if max_steps:
        spec.max_steps = min(max_steps, spec.max_steps or max_steps)
    if rank.world_rank == 0 and not run.versions.exists():  # rank 0 waits for the others anyway
        Thread(target=_note_versions, args=(run,), daemon=True).start()
    world = join(rank, job, os.environ)
    if met:
        met()
    disk_retry.say(f"{rank} on {host()}, {world.device}")
    outcome = train_in(
        world, run, attempt, spec, job.workdir, preemption, on_record,
        heartbeat=heartbeat, on_hang=on_hang,
    )  # fmt: skip
    if outcome == "done":
        arrival.depart(world, spec)
    return outcome


def train_in(
    world: World, run: RunDir, attempt: int, spec: JobSpec, workdir: str, preemption: Preemption,
    on_record: OnRecord | None = None, *, heartbeat: Heartbeat | None = None,
    on_hang: Callable[[], object] | None = None, evaluates: bool = True,
) -> str:  # fmt: skip
    """``train`` for ranks that passed the rendezvous; they may train several runs in turn.

    Args:
        evaluates: False to hold out no samples.
    """
    heartbeat, folder, lease = heartbeat or Heartbeat(), run.attempt(attempt), Lease(run, attempt)
    record = disk_retry.alone(
        lambda: Recorder(folder, active=world.is_main, on_record=on_record, lease=lease)
    )
    try:
        leave = partial(_leave, heartbeat.slot, on_hang) if on_hang else None
        hangs = watching(heartbeat, world, folder, spec.train.hang_seconds, leave)
        with hangs, rank_results.of(run, attempt):
            world.connect(watched=bool(spec.train.hang_seconds and on_hang))
            lease.take(world)
            record("ranks", backend=world.backend, ranks=world.reports)
            deadline = float(os.environ.get("HPCDDP_DEADLINE") or 0)
            if by := arrival.arrive(world, lease, spec, preemption, heartbeat, deadline):
                if world.is_main:
                    lease.drop()
                return _stopped(lease, spec, record, by)
            with heartbeat.patience():
                node_speed.check(world, run, attempt, spec.preflight, record)
            task = tasks.load(spec, workdir)
            task.held_out = evaluates
            preemption.renew()  # the task may have set signal handlers: they are kept and called
            trainer = Trainer(lease, spec, task, world, record, heartbeat)
            preemption.renew()  # so may the model and the data
            return _train(trainer, preemption, deadline)
    finally:
        record.close()


def _leave(slot: Slot, end: Callable[[], object]) -> None:
    """End the process at a hang, once it is not needed to save its step."""
    outlast(slot)
    end()


def _read(run: RunDir) -> JobRecord:
    """The run's record.

    Raises:
        OSError: the record cannot be read now.
    """
    try:
        return record_.read(run)
    except RunUnreadable as error:
        raise OSError(errno.EIO, error.what, str(run.job)) from None


def _note_versions(run: RunDir) -> None:
    """Record the versions of Python and the packages; a failure does no harm."""
    with contextlib.suppress(OSError):
        if packages := versions.installed(sys.executable, os.environ):
            write_json(run.versions, packages)


def _stopped(lease: Lease, spec: JobSpec, record: Recorder, by: str) -> str:
    """Record a stop before the first step: there is nothing to save."""
    step = ledger.newest_step(lease.run)
    facts = {"step": step, "saved": step, "seed": spec.seed}
    record("end", outcome="stopped", **facts, by=by, asked=time.time())
    return "stopped"


def _train(trainer: Trainer, preemption: Preemption, deadline: float) -> str:
    try:
        outcome = trainer.train(preemption, deadline)
        with trainer.heartbeat.patience():
            trainer.world.barrier()
        if trainer.world.is_main:
            trainer.lease.drop()
        return outcome
    except Diverged as error:  # on all ranks
        trainer.record("diverged", **error.facts)
        raise
    finally:
        trainer.close()


def join(rank: Rank, job: JobRecord, environ: Mapping[str, str]) -> World:
    """Join the other ranks of a job at the address in the environment.

    Raises:
        RankMapError: a rank is wrong, duplicated or missing, has lost its GPU or shares it.
    """
    address = None
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT", "").isdecimal():
        address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    least, most = job.nodes
    return worlds.join(
        rank,
        (least, most),
        job.ranks_per_node,
        local=job.backend == "local",
        address=address,
        timeout=float(environ.get("HPCDDP_START_TIMEOUT", START_TIMEOUT)),
    )
