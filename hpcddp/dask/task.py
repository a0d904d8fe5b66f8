"""The worker's half of ``run``: a task of Dask that starts a rank and sees to it.

A rank is a process and no thread of the worker: it can be ended, it may take over signals and fork
data workers, and it leaves nothing behind for the next call.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from hpcddp.attempt.error_record import host
from hpcddp.topology import Rank

LOOK = 0.2  # seconds between two looks at the rank, and at the client
KILL_WAIT = 5.0  # seconds between TERM and KILL


@dataclass
class Job:
    """One rank's part of a call, from the client to a worker."""

    rank: Rank
    environ: dict[str, str]
    pid: int  # of the worker that is meant
    backend: str
    gpus: bool  # each rank has one of its own
    call: bytes  # function and arguments, pickled
    path: list[str]  # where the client finds modules
    call_key: str = ""  # of all ranks of one call


@dataclass
class RankAnswer:
    """The end of a rank. Its result stays pickled until it is with the client."""

    rank: int
    result: bytes = b""
    error: str = ""
    peer: bool = False  # it only says that another rank is gone
    time: float = 0.0  # of a failure, seconds since the epoch

    @classmethod
    def failure(cls, rank: Rank, where: str, words: str, *, peer: bool = False) -> RankAnswer:
        error = f"rank {rank.world_rank} on {where} {words}"
        return cls(rank.world_rank, error=error, peer=peer, time=time.time())


_living: set[tuple[str, int]] = set()  # calls and their ranks that live below this worker


async def gone(call_key: str, seconds: float) -> None:
    """Wait on a worker until the rank of a call has ended there."""
    end = time.monotonic() + seconds
    while any(key == call_key for key, _ in _living) and time.monotonic() < end:
        await asyncio.sleep(LOOK / 4)


def live(job: Job) -> RankAnswer:
    """Runs on a worker, for as long as the rank lives."""
    mine = job.call_key, job.rank.world_rank
    _living.add(mine)
    try:
        return _live(job)
    finally:
        _living.discard(mine)


def _live(job: Job) -> RankAnswer:
    if os.getpid() != job.pid:  # a nanny has started it anew: the other ranks wait for the old one
        return RankAnswer.failure(job.rank, host(), "was ended with its Dask worker")
    ours, theirs = Pipe()
    with ours:
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcddp.dask.child", str(theirs.fileno())],
                env=_environ(job), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            return _listen(job, ours, child)
        finally:
            _end(child)


def _environ(job: Job) -> dict[str, str]:
    environ = {**os.environ, **job.environ}
    if job.environ["MASTER_ADDR"].startswith("127."):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environ


def _listen(job: Job, pipe: Connection, child: subprocess.Popen[bytes]) -> RankAnswer:
    """Pass on the items that the rank sends, until it has ended or is not wanted any more."""
    wanted, queues = _wanted(), {}
    with suppress(ConnectionError):  # it has left already
        pipe.send((sys.path, job))
    while wanted():
        gone = child.poll() is not None  # before the look: its items are still in the pipe
        if not pipe.poll(0 if gone else LOOK):
            if gone:  # its data workers may still hold the pipe
                return _left(job, child)
            continue
        try:
            sent = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return _left(job, child)
        if isinstance(sent, RankAnswer):
            return sent
        key, item = sent
        if key not in queues:
            queues[key] = _queue(key)
        queues[key].put(item)
        with suppress(ConnectionError):  # it may have been killed meanwhile
            pipe.send(None)
    child.terminate()
    return RankAnswer.failure(job.rank, host(), "was cancelled")


def _left(job: Job, child: subprocess.Popen[bytes]) -> RankAnswer:
    """The answer for a rank that has left without one."""
    code = child.wait()
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return RankAnswer.failure(job.rank, host(), f"was ended by {how}, and left no traceback")


def _wanted() -> Any:
    """Whether Dask still waits for this task: a client can cancel it, or be gone."""
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def wanted() -> bool:
        mine = worker.state.tasks.get(key)
        return mine is not None and mine.state == "executing"

    return wanted


def _queue(key: str) -> Any:
    from distributed import Queue

    return Queue(key)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Send TERM, and KILL after a while, to a process that does not end by itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            child.wait(KILL_WAIT)
            return
        except subprocess.TimeoutExpired:
            child.send_signal(number)
    child.wait()
