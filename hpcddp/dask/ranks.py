"""The client's half of ``run``: a function on every worker, as the ranks of one process group."""

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

LOOK = 0.5  # seconds between two looks at the workers
PATIENCE = 5.0  # seconds in which the cause of a rank's failure may come after the failure


def run(
    client: Client, fn: Callable[..., Any], /, *args: Any, backend: str = "", **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every worker at once, as the ranks of a process group.

    Each rank is a process of its own, a child of its worker, so that it has CUDA, the environment
    and signals for itself and that a new call begins anew. It finds RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT; the process group is started before and ended after the function.
    CUDA_VISIBLE_DEVICES is rotated: device 0 is its own GPU, and not the one of LOCAL_RANK.

    Args:
        client: of any Dask cluster on whose workers hpcddp is installed.
        backend: of the process group; NCCL where each rank has a GPU of its own, else gloo.

    Returns: what each rank returned, in the order of ranks.

    Raises:
        UserError: there is no worker, or the function or an argument cannot be pickled.
        RankError: a rank has failed, with its traceback, or a worker has died; all are ended.
    """
    return start(client, fn, *args, backend=backend, **kwargs).results()


def start(
    client: Client, fn: Callable[..., Any], /, *args: Any, backend: str = "", **kwargs: Any
) -> Ranks:
    """The same as ``run``, without waiting for the end."""
    call = packed(fn, args, kwargs)
    if client.asynchronous:
        raise UserError("the client is asynchronous", hint="make it with asynchronous=False")
    workers: dict[str, WorkerInfo] = client.run(placement.look)
    if not workers:
        raise UserError("the Dask cluster has no workers", hint="client.wait_for_workers(N) waits")
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
    """The host of a worker's address. Workers that are threads of one process have none."""
    url = urlsplit(address)
    return "127.0.0.1" if url.scheme == "inproc" else url.hostname or address


def packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call as bytes.

    Raises:
        UserError: a part of it cannot be pickled; the error names the part.
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
                f"{part} cannot be pickled: {error}",
                where="hpcddp.dask.run",
                hint="open files, locks, clients and generators are made inside of the function; "
                "pass what they are made of",
            ) from None
    return _pickled((fn, args, kwargs))


def _pickled(value: Any) -> bytes:
    """Pickle a value by cloudpickle, and modules of another class than ModuleType by their names.

    torch.classes and torch.ops are two of these. cloudpickle does not know them as modules, and
    meets them in any function with the names `torch` and `.classes` in it.
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
    """The ranks of one call, on their workers."""

    client: Client
    key: str
    futures: dict[Future[Any], tuple[Rank, str, str]] = field(default_factory=dict)  # worker, host
    answers: dict[int, RankAnswer] = field(default_factory=dict)  # of the ranks that have ended

    def add(self, worker: str, host: str, job: task.Job) -> None:
        """Start the next rank. It belongs to this worker, and no other may take its place."""
        future = self.client.submit(
            task.live, job, key=f"hpcddp-{self.key}-rank-{job.rank.world_rank}", pure=False,
            workers=[worker], allow_other_workers=False, retries=0,
        )  # fmt: skip
        self.futures[future] = job.rank, worker, host

    def results(self, meanwhile: Callable[[], object] = bool) -> list[Any]:
        """The results of all ranks, in their order; all are ended when one fails.

        Args:
            meanwhile: called twice a second, and when all have ended.

        Raises:
            RankError: the first failure that is no consequence of another.
        """
        try:
            answers = self._answers(meanwhile)
        finally:
            self.cancel()
            meanwhile()
        return [pickle.loads(answer.result) for answer in answers]

    def cancel(self) -> None:
        """End the ranks that still run, if the cluster can be reached, and wait until they have
        ended: then all that they sent is there."""
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
        """The answers of the ranks that have ended, or whose worker is gone."""
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
                yield RankAnswer.failure(rank, host, f"was ended with its Dask worker, {worker}")
