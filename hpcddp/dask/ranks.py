"""The client's part of ``run``: a function on every worker, as the ranks of one process group."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hpcddp.dask import placement, task
from hpcddp.dask.placement import WorkerInfo
from hpcddp.dask.task import RankAnswer
from hpcddp.errors import RankError, UserError
from hpcddp.rundir import token
from hpcddp.topology import Rank

if TYPE_CHECKING:
    from distributed import Client, Future

LOOK = 0.5  # seconds between two checks of the workers
PATIENCE = 5.0  # seconds to wait for the cause after a failure that is only a consequence


def run(
    client: Client, fn: Callable[..., Any], /, *args: Any, backend: str = "", **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every Dask worker at once, as the ranks of one process group.

    Each rank is a child process of its worker: it has its own CUDA context, environment and
    signals, and each call starts new processes. The variables RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT are set. The process group is started before the function and ended
    after it.
    CUDA_VISIBLE_DEVICES starts with the rank's own GPU: use device 0, not device LOCAL_RANK.

    Args:
        client: Client of any Dask cluster on whose workers hpcddp is installed.
        fn: Called on every rank. It is pickled by cloudpickle, with its arguments.
        args: Positional arguments of ``fn``.
        backend: Backend of the process group. Default: NCCL where each rank has its own GPU, else
            gloo.
        kwargs: Keyword arguments of ``fn``.

    Returns:
        The return value of each rank, in the order of ranks.

    Raises:
        UserError: The client is asynchronous, the cluster has no workers, or the function or an
            argument cannot be pickled.
        RankError: A rank failed (the error has its traceback), or a worker ended. All other ranks
            are ended first.
    """
    return start(client, fn, *args, backend=backend, **kwargs).results()


def start(
    client: Client, fn: Callable[..., Any], /, *args: Any, backend: str = "", **kwargs: Any
) -> Ranks:
    """Start ``fn(*args, **kwargs)`` on every Dask worker, as ``run`` does, without waiting.

    Returns:
        The ranks. Their ``results()`` waits for the end.

    Raises:
        UserError: As ``run``.
    """
    call = packed(fn, args, kwargs)
    if client.asynchronous:
        hint = "make the client with asynchronous=False"
        raise UserError("asynchronous Dask clients are not supported", hint=hint)
    workers: dict[str, WorkerInfo] = client.run(placement.look)
    if not workers:
        hint = "start workers, or wait for them with client.wait_for_workers(N)"
        raise UserError("the Dask cluster has no workers", hint=hint)
    by_address = placement.ranks(workers)
    ordered = [workers[address] for address in by_address]
    gpus = placement.has_gpus(ordered)
    visible = [",".join(names) for names in placement.devices(ordered)]
    master = _host(next(iter(by_address)))
    common = {"MASTER_ADDR": master, "MASTER_PORT": str(ordered[0].port)}
    ranks = Ranks(client, token(4))
    for (address, rank), worker, devices in zip(by_address.items(), ordered, visible, strict=True):
        environ = {**rank.to_env(), **common}
        if devices:
            environ["CUDA_VISIBLE_DEVICES"] = devices
        job = task.Job(rank, environ, worker.pid, backend, gpus, call, sys.path, ranks.key)
        ranks.add(address, worker.host, job)
    return ranks


def _host(address: str) -> str:
    """The host of a worker's address. Workers in threads of this process have no host."""
    url = urlsplit(address)
    return "127.0.0.1" if url.scheme == "inproc" else url.hostname or address


def packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call.

    Raises:
        UserError: the function or an argument cannot be pickled; the error names it.
    """
    name = getattr(fn, "__name__", repr(fn))
    parts = {f"the function {name}": fn}
    parts |= {f"argument {i} of {name}": value for i, value in enumerate(args, 1)}
    parts |= {f"the argument {key} of {name}": value for key, value in kwargs.items()}
    for part, value in parts.items():
        try:
            _pickled(value)
        except Exception as error:
            raise UserError(
                f"cannot pickle {part}: {error}",
                where="hpcddp.dask.run",
                hint="make open files, locks, clients and generators inside the function, and pass "
                "the values that they need",
            ) from None
    return _pickled((fn, args, kwargs))


def _pickled(value: Any) -> bytes:
    """Pickle a value by cloudpickle, and modules of a subclass of ModuleType by name.

    torch.classes and torch.ops are such modules. cloudpickle does not treat them as modules, and
    finds them in any function that contains the names `torch` and `.classes`.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, ModuleType) and type(value) is not ModuleType:
                return importlib.import_module, (value.__name__,)
            return super().reducer_override(value)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


@dataclass
class Ranks:
    """The ranks of one call of ``start``, on their workers."""

    client: Client
    key: str
    futures: dict[Future[Any], tuple[Rank, str, str]] = field(default_factory=dict)  # worker, host
    answers: dict[int, RankAnswer] = field(default_factory=dict)  # of the ranks that have ended

    def add(self, worker: str, host: str, job: task.Job) -> None:
        """Start a rank on this worker, and on no other."""
        future = self.client.submit(
            task.live, job, key=f"hpcddp-{self.key}-rank-{job.rank.world_rank}", pure=False,
            workers=[worker], allow_other_workers=False, retries=0,
        )  # fmt: skip
        self.futures[future] = job.rank, worker, host

    def results(self, meanwhile: Callable[[], object] = bool) -> list[Any]:
        """Wait for all ranks, and return their return values in the order of ranks.

        When a rank fails, all others are ended.

        Args:
            meanwhile: Called without arguments twice a second, and when all ranks have ended.

        Raises:
            RankError: A rank failed. The error is the first one that is not a consequence of
                another rank's failure.
        """
        try:
            answers = self._answers(meanwhile)
        finally:
            self.cancel()
            meanwhile()
        return [pickle.loads(answer.result) for answer in answers]

    def cancel(self) -> None:
        """End the ranks that still run, and wait for their end.

        Afterwards all that they sent has arrived. Does nothing if the cluster does not answer.
        """
        with contextlib.suppress(Exception):
            self.client.cancel(list(self.futures), force=True, reason="hpcddp: the call has ended")
            if len(self.answers) < len(self.futures):
                self.client.run(task.gone, self.key, 2 * task.KILL_WAIT + 2, on_error="ignore")

    def _answers(self, meanwhile: Callable[[], object]) -> list[RankAnswer]:
        deadline = float("inf")
        while True:
            self.answers |= {answer.rank: answer for answer in self._ended()}
            meanwhile()
            failed = [answer for answer in self.answers.values() if answer.error]
            causes = [answer for answer in failed if not answer.peer]
            deadline = min(deadline, time.monotonic() + PATIENCE if failed else deadline)
            complete = len(self.answers) == len(self.futures)
            if causes or (failed and (complete or time.monotonic() > deadline)):
                raise RankError(min(causes or failed, key=lambda answer: answer.time).error)
            if complete:
                return [self.answers[rank] for rank in sorted(self.answers)]
            self._wait()

    def _wait(self) -> None:
        from distributed import CancelledError, wait

        pending = [future for future in self.futures if not future.done()]
        with contextlib.suppress(TimeoutError, CancelledError):
            wait(pending, timeout=LOOK, return_when="FIRST_COMPLETED")

    def _ended(self) -> Iterator[RankAnswer]:
        """The answers of ranks that have ended since the last check, or whose worker has ended."""
        try:
            alive = set(self.client.nthreads())
        except OSError as error:
            raise RankError(f"Dask's scheduler does not answer: {error}") from None
        for future, (rank, worker, host) in self.futures.items():
            if rank.world_rank in self.answers:
                continue
            if future.status == "finished":
                yield future.result()
            elif future.status != "pending":
                cause = future.exception() if future.status == "error" else "cancelled"
                yield RankAnswer.failure(rank, host, f"was lost by Dask: {cause!s}")
            elif worker not in alive:
                yield RankAnswer.failure(
                    rank, host, f"ended together with its Dask worker {worker}"
                )
