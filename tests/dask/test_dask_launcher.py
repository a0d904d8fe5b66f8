"""The launcher `dask` on this machine: ranks as under other launchers, with a Dask cluster."""

import json
import sys
from typing import Any

import pytest
from distributed.utils import get_ip
from local_runs import Command, toy, until
from sites import SUPPORT, Outcome, Site

from hpcddp import processes
from hpcddp.attempt import ledger
from hpcddp.dask import gang
from hpcddp.errors import UserError, install_extra
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank

__all__ = ["toy"]

# One attempt; `toy` ends the processes that a test leaves.
ONCE = ("--set", "requeue.enabled=false")
DDP = str(SUPPORT / "ddp_script.py")

# A module in the program's own folder only.
BESIDE = """
def tell(word):
    import torch.distributed as dist
    return [dist.get_rank(), dist.get_world_size(), word]
"""
# A program for the cluster: prints the view of a client, of a stranger and of an observer.
PROGRAM = """
import asyncio, json, os, stat, sys
import psutil
from distributed import Security
from distributed.comm import connect
import hpcddp.dask
from beside import tell

async def answered(address, security, limit):
    try:
        comm = await connect(address, timeout=limit, **security.get_connection_args("client"))
        await comm.write({"op": "identity", "reply": True})
        return bool(await comm.read())
    except OSError:
        return False

async def ask(scheme, security, limit=3):
    asked = [answered(address.replace("tls", scheme), security, limit) for address in addresses]
    return await asyncio.gather(*asked)

client = hpcddp.dask.client()
addresses = [client.scheduler.address, *client.nthreads()]
folder = os.environ["HPCDDP_DASK"]
worker = psutil.Process(os.getppid())
listening = []
for process in [worker, *worker.children()]:
    listening += [c.laddr for c in process.net_connections() if c.status == "LISTEN"]
with open("told.json", "w") as file:
    json.dump({
        "ranks": hpcddp.dask.run(client, tell, *sys.argv[1:]),
        "sum": client.submit(sum, [1, 2]).result(),
        "names": sorted(w["name"] for w in client.scheduler_info(-1)["workers"].values()),
        "mine": asyncio.run(ask("tls", Security(), limit=60)),
        "stranger": asyncio.run(ask("tls", Security.temporary())),
        "plain": asyncio.run(ask("tcp", Security(require_encryption=False))),
        "modes": {name: stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode)
                  for name in (".", "tls.pem")},
        "listening": listening,
    }, file)
"""


def submit(
    command: Command, *words: str, nodes: str = "2", gpus: str = "2", launcher: str = "dask"
) -> Outcome:
    size = ("--nodes", nodes, "--gpus", gpus, "--launcher", launcher, *ONCE)
    return command("submit", *size, "--no-snapshot", "--", sys.executable, *words)


def told_by(site: Site) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((site.folder / "told.json").read_text())
    return report


@pytest.mark.full
def test_a_script_for_ddp_ends_with_the_same_weights(toy: Site, command: Command) -> None:
    reports = []
    for launcher in ("spawn", "dask"):
        assert submit(command, DDP, "told.json", launcher=launcher).code == 0
        reports.append(told_by(toy))
    assert reports[0] == reports[1]
    assert reports[1]["places"] == [[rank, rank % 2, rank // 2] for rank in range(4)]
    assert "3: rank 3 of 4, local rank 1" in command("logs", "--rank", "3").out


def test_a_program_has_the_cluster_and_nobody_else(toy: Site, command: Command) -> None:
    toy.write("beside.py", BESIDE)
    toy.write("program.py", PROGRAM)
    done = submit(command, "-m", "hpcddp.dask", "program.py", "a b")
    assert done.code == 0, done.text
    report = told_by(toy)
    assert report["ranks"] == [[rank, 4, "a b"] for rank in range(4)]
    assert (report["sum"], report["names"]) == (3, [0, 1, 2, 3])
    assert report["mine"] == [True] * 5  # the scheduler, and each worker
    assert report["stranger"] == report["plain"] == [False] * 5
    assert report["modes"] == {".": 0o700, "tls.pem": 0o600}
    assert [host for host, _ in report["listening"]] == ["127.0.0.1"] * 2  # and no web server
    (run,) = toy.runs.iterdir()
    assert not list(run.rglob("*.pem"))


def test_a_program_that_fails_ends_the_job_with_its_traceback(toy: Site, command: Command) -> None:
    toy.write("program.py", "import hpcddp.dask\nhpcddp.dask.client()\nraise ValueError('no')")
    done = submit(command, "-m", "hpcddp.dask", "program.py", nodes="1")
    assert done.code == 1 and "0: ValueError: no" in done.text
    (path,) = toy.runs.iterdir()
    assert [a.exit_code for a in ledger.attempts(RunDir(path))] == [1]


def test_a_rank_that_fails_ends_the_others(toy: Site, command: Command) -> None:
    toy.write("train.py", "import os, time\nif os.environ['RANK'] == '1': os._exit(7)\n"
                           "open('up-' + str(os.getpid()), 'w')\ntime.sleep(600)")  # fmt: skip
    done = submit(command, "train.py", nodes="1")
    (path,) = toy.runs.iterdir()
    assert [a.exit_code for a in ledger.attempts(RunDir(path))] == [7], done.text
    assert not any(processes.start_of(int(p.name[3:])) for p in toy.folder.glob("up-*"))


@pytest.mark.full
def test_a_stop_reaches_each_rank(toy: Site, command: Command) -> None:
    toy.write("train.py", """
import os, signal, sys, time
def leave(number, frame):
    open("left-" + os.environ["RANK"], "w").close()
    sys.exit(0)
signal.signal(signal.SIGUSR2, leave)
open("up-" + os.environ["RANK"], "w").close()
time.sleep(600)
""")  # fmt: skip
    size = ("--nodes", "2", "--gpus", "1", "--launcher", "dask", "--detach")
    command("submit", *size, "--no-snapshot", "--", sys.executable, "train.py")
    until(command, lambda s: len(list(toy.folder.glob("up-*"))) == 2)
    assert command("stop", "last").code == 0
    until(command, lambda s: s["state"] == "STOPPED")
    assert len(list(toy.folder.glob("left-*"))) == 2


@pytest.mark.parametrize("missing", [("distributed",), ("distributed", "cryptography")])
def test_what_is_not_installed_is_told_before_submission(
    site: Site, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    flags = Layer()
    flags.put("launcher", "dask", "--launcher")
    with pytest.raises(
        UserError, match=" and ".join(missing) + " (is|are) not installed"
    ) as caught:
        site.plan(flags)
    assert caught.value.hint == install_extra("dask")


def test_it_listens_on_the_network_of_the_cluster() -> None:
    outside = get_ip()
    first, last = (Rank(rank, 2, 0, 1, rank) for rank in range(2))
    named = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": outside}
    assert gang.address(last, named) == "127.0.0.1"
    # A host's own name often resolves to a loopback address: the route to another node does not.
    job = {"MASTER_ADDR": "localhost", "SLURM_JOB_NODELIST": f"localhost,{outside}"}
    assert gang.address(first, job) == outside
    assert gang.address(last, {"MASTER_ADDR": outside}) == outside
