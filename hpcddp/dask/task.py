"""The worker's part of ``run``: a Dask task that starts a rank and supervises it.

A rank is a process and not a thread of the worker: so it can be ended, can handle signals and fork
data workers, and leaves no state for the next call.
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

LOOK = 0.2  # seconds between two checks of the rank and of the client
KILL_WAIT = 5.0  # seconds between TERM and KILL


@dataclass
class Job:
    """One rank's part of a call, sent from the client to a worker."""

    rank: Rank
    environ: dict[str, str]
    pid: int  # of the worker process that the client has seen
    backend: str
    gpus: bool  # each rank has its own GPU
    call: bytes  # function and arguments, pickled
    path: list[str]  # the client's sys.path
    call_key: str = ""  # the same for all ranks of one call


@dataclass
class RankAnswer:
    """The end of a rank. The client unpickles its result."""

    rank: int
    result: bytes = b""
    error: str = ""
    peer: bool = False  # the error is only a consequence of another rank's end
    time: float = 0.0  # of a failure, seconds since the epoch

    @classmethod
    def failure(cls, rank: Rank, where: str, words: str, *, peer: bool = False) -> RankAnswer:
        error = f"rank {rank.world_rank} on {where} {words}"
        return cls(rank.world_rank, error=error, peer=peer, time=time.time())


_living: set[tuple[str, int]] = set()  # (call, rank) of the running children of this worker


async def gone(call_key: str, seconds: float) -> None:
    """Wait until a call's ranks on this worker have ended; runs on the worker."""
    end = time.monotonic() + seconds
    while any(key == call_key for key, _ in _living) and time.monotonic() < end:
        await asyncio.sleep(LOOK / 4)


def live(job: Job) -> RankAnswer:
    """Run a rank until its end; runs on a worker."""
    mine = job.call_key, job.rank.world_rank
    _living.add(mine)
    try:
        return _live(job)
    finally:
        _living.discard(mine)


def _live(job: Job) -> RankAnswer:
    if os.getpid() != job.pid:  # a nanny restarted the worker: the other ranks wait for the old one
        return RankAnswer.failure(job.rank, host(), "ended together with its Dask worker")
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
    """Forward the items that the rank sends, until the rank ends or the task is cancelled."""
    wanted, queues = _wanted(), {}
    with suppress(ConnectionError):  # the rank has already ended
        pipe.send((sys.path, job))
    while wanted():
        gone = child.poll() is not None  # asked first: its items are still in the pipe
        if not pipe.poll(0 if gone else LOOK):
            if gone:  # data workers may keep the pipe open
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
        with suppress(ConnectionError):  # the rank may have been killed meanwhile
            pipe.send(None)
    child.terminate()
    return RankAnswer.failure(job.rank, host(), "was cancelled")


def _left(job: Job, child: subprocess.Popen[bytes]) -> RankAnswer:
    """The answer for a rank that ended without sending one."""
    code = child.wait()
    how = (
        f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    )
    return RankAnswer.failure(job.rank, host(), f"{how} and left no traceback")


def _wanted() -> Any:
    """Return a check whether Dask still waits for this task: the client may cancel it or end."""
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
    """Send TERM, and after a while KILL, to a process that does not end by itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            child.wait(KILL_WAIT)
            return
        except subprocess.TimeoutExpired:
            child.send_signal(number)
    child.wait()
