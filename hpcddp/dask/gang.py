"""The launcher `dask`: a Dask worker for each GPU, and the rank beside it.

    python -P -m hpcddp.dask.gang THREADS COMMAND...

Started once per rank, by srun or by spawn.py: this process is the worker, and the rank is its
child. That of rank 0 has one more child, the scheduler. A Dask worker runs any code that a peer
sends. So all of them talk over TLS alone, with a certificate made for this attempt that only the
run's owner can read, and listen on the cluster's network alone. The cluster ends with rank 0;
training does not need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hpcddp.errors import HpcddpError
from hpcddp.launch.torchrun import exit_code
from hpcddp.preempt import stop_signals
from hpcddp.rundir import RunDir, read_json, write_json, write_text
from hpcddp.slurm.hostlist import expand_hosts, first_host
from hpcddp.topology import Rank

if TYPE_CHECKING:
    from distributed import Security

START = 600.0  # seconds in which the scheduler must be there
LOOK = 0.1  # seconds between two looks for it
CLOSE = 5.0  # seconds for a worker to say goodbye
NO_HTTP = "127.0.0.1:0"  # Dask cannot do without its web server; it is stopped at once


class Gang:
    """The files of one attempt's cluster, in the attempt's folder."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        run = RunDir(environ["HPCDDP_RUN_DIR"])
        self.folder = run.attempt(int(environ["HPCDDP_ATTEMPT"])).dask
        self.pem = self.folder / "tls.pem"
        self.file = self.folder / "scheduler.json"

    def certify(self) -> None:
        """Make the certificate that all of them show to each other."""
        from distributed import Security

        temporary = Security.temporary()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_text(self.pem, temporary.tls_client_cert + temporary.tls_client_key, mode=0o600)

    def security(self) -> Security:
        """For each role: nothing goes without TLS, and without this very certificate."""
        from distributed import Security

        roles = ("client", "scheduler", "worker")
        names = [f"tls_{role}_{part}" for role in roles for part in ("cert", "key")]
        paths = dict.fromkeys((*names, "tls_ca_file"), str(self.pem))
        return Security(require_encryption=True, **paths)

    def environment(self, address: str) -> dict[str, str]:
        """The variables by which ``distributed.Client()`` in a rank finds the cluster."""
        tls = "DASK_DISTRIBUTED__COMM__TLS__"
        return {
            "HPCDDP_DASK": str(self.folder),
            "DASK_SCHEDULER_ADDRESS": address,
            "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True",
            f"{tls}CA_FILE": str(self.pem),
            f"{tls}CLIENT__CERT": str(self.pem),
            f"{tls}CLIENT__KEY": str(self.pem),
        }


def address(rank: Rank, environ: Mapping[str, str]) -> str:
    """This host's address on the cluster's network: that of the named interface, or the one from
    which it reaches another node of the job. Its own name may be a loopback's."""
    from distributed.utils import get_ip, get_ip_interface

    if name := environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        return str(get_ip_interface(name))
    peer, nodes = environ["MASTER_ADDR"], environ.get("SLURM_JOB_NODELIST", "")
    if rank.node == 0 and nodes:
        suffix = peer.removeprefix(first_host(nodes))
        peer = expand_hosts(nodes)[-1] + suffix
    return str(get_ip(peer))


async def schedule() -> None:
    """The scheduler, for as long as its input is open."""
    import dask
    from distributed import Scheduler

    gang, rank = Gang(os.environ), Rank.from_env(os.environ)
    with dask.config.set({"distributed.scheduler.http.routes": []}):
        scheduler = Scheduler(
            host=address(rank, os.environ), protocol="tls", security=gang.security(),
            dashboard=False, dashboard_address=NO_HTTP,
        )  # fmt: skip
    scheduler.http_server.stop()
    async with scheduler:
        write_json(gang.file, {"address": scheduler.address})
        await asyncio.to_thread(sys.stdin.buffer.read)


class Member:
    """One rank's process: the Dask worker, with the rank as its child."""

    def __init__(self, threads: int, command: list[str]) -> None:
        self.threads, self.command = threads, command
        self.rank, self.gang = Rank.from_env(os.environ), Gang(os.environ)
        self.scratch = tempfile.mkdtemp(prefix="hpcddp-")  # where the worker spills to
        self.begun, self.asked = False, list[int]()  # signals for the rank
        self.child: asyncio.subprocess.Process | None = None
        self.scheduler: subprocess.Popen[bytes] | None = None

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal on to the rank. Before the rank is there, end as without a handler."""
        if not self.begun:
            self.leave(128 + number)
        self.asked.append(number)
        self._tell()

    def _tell(self) -> None:
        while self.child is not None and self.asked:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(self.asked.pop(0))

    def leave(self, code: int) -> NoReturn:
        """End at once; the scheduler ends with its input, and its certificate goes."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.rank.world_rank == 0:
            shutil.rmtree(self.gang.folder, ignore_errors=True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    async def run(self) -> NoReturn:
        """Live, and leave from within: to unwind Dask's own tasks takes its time."""
        try:
            code = await self.live()
        except Exception as error:
            own = isinstance(error, HpcddpError)
            print(error if own else traceback.format_exc(), file=sys.stderr)
            code = 1
        self.leave(code)

    async def live(self) -> int:
        """Work until the rank has left and, where it left well, until rank 0 has."""
        import dask
        from distributed import Worker

        if self.rank.world_rank == 0:
            self._begin()
        scheduler = await self._scheduler()
        with dask.config.set({"distributed.worker.http.routes": []}):
            worker: Any = await Worker(
                scheduler, name=self.rank.world_rank, nthreads=self.threads, protocol="tls",
                host=address(self.rank, os.environ), security=self.gang.security(),
                local_directory=self.scratch, dashboard=False, dashboard_address=NO_HTTP,
            )  # fmt: skip
        worker.http_server.stop()
        environ = {**os.environ, **self.gang.environment(scheduler)}
        self.begun = True
        self.child = await asyncio.create_subprocess_exec(*self.command, env=environ)
        self._tell()  # signals that came while it was started
        code = await self.child.wait()
        if code == 0:
            await self._part(worker)
        return exit_code(self.rank.world_rank, code)

    async def _part(self, worker: Any) -> None:
        """Wait for rank 0, and say goodbye."""
        if self.scheduler is None:
            await worker.finished()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(worker.close(executor_wait=False), CLOSE)

    def _begin(self) -> None:
        self.gang.certify()
        argv = [sys.executable, "-P", "-m", "hpcddp.dask.gang"]
        self.scheduler = subprocess.Popen(argv, stdin=subprocess.PIPE)

    async def _scheduler(self) -> str:
        """The scheduler's address, when it is there."""
        for _ in range(int(START / LOOK)):
            if facts := read_json(self.gang.file):
                return str(facts["address"])
            if self.scheduler and self.scheduler.poll() is not None:
                raise HpcddpError("Dask's scheduler has ended before it began", where="launcher")
            await asyncio.sleep(LOOK)
        raise HpcddpError(f"no Dask scheduler after {START:.0f} s", where=str(self.gang.file))


def main(args: list[str]) -> None:
    """One rank's worker; without arguments the scheduler."""
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")  # a job's [env] may want more
    if not args:
        for number in (*stop_signals(), signal.SIGINT):  # Slurm signals all processes of a step
            signal.signal(number, signal.SIG_IGN)
        asyncio.run(schedule())
        return
    member = Member(int(args[0]), args[1:])
    for number in stop_signals():
        signal.signal(number, member.pass_on)
    asyncio.run(member.run())


if __name__ == "__main__":
    main(sys.argv[1:])
