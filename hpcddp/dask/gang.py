"""The launcher `dask`: a Dask worker for each GPU, with its rank beside it.

    python -P -m hpcddp.dask.gang THREADS COMMAND...

srun or spawn.py starts it once per rank. This process is the Dask worker, and the rank is its
child. The worker of rank 0 has the scheduler as a second child. A Dask worker runs any code that a
peer sends. So all of them use TLS only, with a certificate of this attempt that only the run's
owner can read, and listen on the cluster's network only. The cluster ends with rank 0; a training
does not need it.
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

START = 600.0  # seconds for the scheduler to start
LOOK = 0.1  # seconds between two checks for it
CLOSE = 5.0  # seconds for a worker to close its connections
NO_HTTP = "127.0.0.1:0"  # Dask always starts a web server; it is stopped at once


class Gang:
    """The files of one attempt's cluster, in the attempt's folder."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        run = RunDir(environ["HPCDDP_RUN_DIR"])
        self.folder = run.attempt(int(environ["HPCDDP_ATTEMPT"])).dask
        self.pem = self.folder / "tls.pem"
        self.file = self.folder / "scheduler.json"

    def certify(self) -> None:
        """Make the certificate that scheduler, workers and clients authenticate with."""
        from distributed import Security

        temporary = Security.temporary()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_text(self.pem, temporary.tls_client_cert + temporary.tls_client_key, mode=0o600)

    def security(self) -> Security:
        """TLS settings of all roles: encryption is required, only this certificate is trusted."""
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
    """This host's address on the cluster's network.

    It is the address of the interface in GLOO_SOCKET_IFNAME, or else the address from which this
    host reaches another node of the job. The host's own name may resolve to a loopback address.
    """
    from distributed.utils import get_ip, get_ip_interface

    if name := environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        return str(get_ip_interface(name))
    peer, nodes = environ["MASTER_ADDR"], environ.get("SLURM_JOB_NODELIST", "")
    if rank.node == 0 and nodes:
        suffix = peer.removeprefix(first_host(nodes))
        peer = expand_hosts(nodes)[-1] + suffix
    return str(get_ip(peer))


async def schedule() -> None:
    """Run the scheduler until its standard input is closed."""
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
    """The process of one rank: the Dask worker, with the rank as its child."""

    def __init__(self, threads: int, command: list[str]) -> None:
        self.threads, self.command = threads, command
        self.rank, self.gang = Rank.from_env(os.environ), Gang(os.environ)
        self.scratch = tempfile.mkdtemp(prefix="hpcddp-")  # the worker's folder for spilled data
        self.begun, self.asked = False, list[int]()  # asked: signals to send to the rank
        self.child: asyncio.subprocess.Process | None = None
        self.scheduler: subprocess.Popen[bytes] | None = None

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the rank. Before the rank has started, end as without a handler."""
        if not self.begun:
            self.leave(128 + number)
        self.asked.append(number)
        self._tell()

    def _tell(self) -> None:
        while self.child is not None and self.asked:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(self.asked.pop(0))

    def leave(self, code: int) -> NoReturn:
        """End at once. This closes the scheduler's input; rank 0 also removes the certificate."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.rank.world_rank == 0:
            shutil.rmtree(self.gang.folder, ignore_errors=True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    async def run(self) -> NoReturn:
        """Run, and end the process from inside the event loop: closing Dask's own tasks is slow."""
        try:
            code = await self.live()
        except Exception as error:
            own = isinstance(error, HpcddpError)
            print(error if own else traceback.format_exc(), file=sys.stderr)
            code = 1
        self.leave(code)

    async def live(self) -> int:
        """Run the worker until the rank has ended; after exit code 0 until rank 0 has ended."""
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
        self._tell()  # signals that arrived during the start
        code = await self.child.wait()
        if code == 0:
            await self._part(worker)
        return exit_code(self.rank.world_rank, code)

    async def _part(self, worker: Any) -> None:
        """Wait until rank 0 ends, and close the worker."""
        if self.scheduler is None:
            await worker.finished()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(worker.close(executor_wait=False), CLOSE)

    def _begin(self) -> None:
        self.gang.certify()
        argv = [sys.executable, "-P", "-m", "hpcddp.dask.gang"]
        self.scheduler = subprocess.Popen(argv, stdin=subprocess.PIPE)

    async def _scheduler(self) -> str:
        """Wait for the scheduler, and return its address."""
        for _ in range(int(START / LOOK)):
            if facts := read_json(self.gang.file):
                return str(facts["address"])
            if self.scheduler and self.scheduler.poll() is not None:
                raise HpcddpError("Dask's scheduler ended during its start", where="launcher dask",
                                  hint="its error is in the log, before this line")  # fmt: skip
            await asyncio.sleep(LOOK)
        raise HpcddpError(f"Dask's scheduler did not start within {START:.0f} s",
                          where=str(self.gang.file), hint="see `hpcddp logs --rank 0`")  # fmt: skip


def main(args: list[str]) -> None:
    """Run one rank's worker; without arguments, the scheduler."""
    os.environ.setdefault(
        "DASK_LOGGING__DISTRIBUTED", "warning"
    )  # a job's [env] can set another level
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
