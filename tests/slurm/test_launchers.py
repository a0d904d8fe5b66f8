"""The ways to start a job's processes, each with the same script, on the real Slurm."""

import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sites import SUPPORT

from hpcddp.attempt import ledger
from hpcddp.slurm.hostlist import expand_hosts

from .desk import Desk, wait_for

SCRIPT = str(SUPPORT / "ddp_script.py")
LAUNCHERS = ("srun", "fork", "torchrun", "mpi", "horovod", "dask")
LONG = pytest.mark.full

# A program for a Dask cluster: a function on each of its workers.
PROGRAM = """
import json, os, sys
import hpcddp.dask
def tell():
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME")
    return [os.environ.get(name) for name in names]
client = hpcddp.dask.client()
found = hpcddp.dask.run(client, tell, backend="gloo")
json.dump({"found": found}, open(sys.argv[1], "w"))
"""

# Two ranks say that they are up; what stops them first is noted by each. A rank waits with leaving
# for the others' notes, since its end would be theirs.
WAIT = """
import glob, os, signal, sys, time
def leave(number, frame):
    open(f"left-{os.environ['RANK']}-{os.environ['HPCDDP_ATTEMPT']}", "w").close()
    until = time.monotonic() + 3
    while len(glob.glob("left-?-1")) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < until:
        time.sleep(0.02)
    sys.exit(3)
if os.environ["HPCDDP_ATTEMPT"] != "1":
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGUSR2, leave)
open(f"up-{os.environ['RANK']}", "w").close()
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def pretend(desk: Desk) -> None:
    """A package horovod, as far as its launcher looks at it."""
    (desk.folder / "horovod").mkdir()
    (desk.folder / "horovod/__init__.py").touch()


@pytest.fixture
def gpus(pytestconfig: pytest.Config) -> int:
    """Of each of two nodes."""
    return 2 if pytestconfig.getoption("--full") else 1


def size_of(gpus: int) -> tuple[str, ...]:
    return ("--nodes", "2", "--gpus", str(gpus))


def places(gpus: int) -> list[list[int]]:
    """Rank, local rank and node of each."""
    return [[rank, rank % gpus, rank // gpus] for rank in range(2 * gpus)]


def submit(desk: Desk, launcher: str, size: tuple[str, ...], *words: str) -> dict[str, Any]:
    how = ("--no-snapshot", "--launcher", launcher, "--follow")
    desk("submit", *size, *how, "--", sys.executable, *words)
    found: dict[str, Any] = json.loads((desk.folder / "told.json").read_text())
    return found


def start_waiting(desk: Desk, gpus: int, *how: str) -> str:
    """Submit a job whose ranks wait to be stopped; the run's name when all of them do."""
    (desk.folder / "wait.py").write_text(WAIT)
    words = ("--json", "--detach", "--", sys.executable, "wait.py")
    out = desk("submit", "--no-snapshot", *size_of(gpus), *how, *words)
    wait_for(lambda: len(list(desk.folder.glob("up-*"))) == 2 * gpus)
    run: str = json.loads(out.splitlines()[0])["run"]
    return run


def test_every_launcher_ends_with_the_same_weights(desk: Desk, gpus: int) -> None:
    found, size = {}, 2 * gpus
    for launcher in LAUNCHERS:
        found[launcher] = submit(desk, launcher, size_of(gpus), SCRIPT, "told.json")
        assert found[launcher]["places"] == places(gpus)
        (desk.folder / "told.json").unlink()
        last = str(size - 1)
        lines = [x for x in desk("logs", "--rank", last).splitlines() if "local rank" in x]
        said = [f"{last}: rank {last} of {size}, local rank {gpus - 1} "]
        assert [line.partition("on ")[0] for line in lines] == said, desk("logs")
    here = ("--cluster", "local", "--nodes", "1", "--gpus", str(size))
    found["spawn"] = submit(desk, "spawn", here, SCRIPT, "told.json")
    assert found["spawn"]["places"] == [[rank, rank, 0] for rank in range(size)]
    weights = {name: row["weights"] for name, row in found.items()}
    assert weights == dict.fromkeys(weights, weights["srun"])


def test_a_program_runs_a_function_on_each_worker_of_its_dask_cluster(
    desk: Desk, gpus: int
) -> None:
    (desk.folder / "program.py").write_text(PROGRAM)
    found = submit(desk, "dask", size_of(gpus), "-m", "hpcddp.dask", "program.py", "told.json")
    found = found["found"]
    devices = ("0,1", "1,0") if gpus == 2 else ("0",)
    rows = [[*map(str, place), devices[place[1]]] for place in places(gpus)]
    assert [row[:4] for row in found] == rows
    assert len({row[4] for row in found}) == 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_reaches_each_rank_and_the_job_comes_back(
    desk: Desk, launcher: str, gpus: int
) -> None:
    run = start_waiting(desk, gpus, "--launcher", launcher)
    desk.take_all_nodes()
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    assert len(list(desk.folder.glob("left-?-1"))) == 2 * gpus
    assert [a.cause for a in ledger.attempts(desk.run(run))] == ["preempted", "done"]


@LONG
@pytest.mark.parametrize("launcher", ["fork", "torchrun", "mpi", "dask"])
def test_the_built_in_worker_stops_and_goes_on(desk: Desk, launcher: str, gpus: int) -> None:
    long = ("--set", "max_steps=400", "--set", "dataset.pause=0.01")
    run = desk.submit(*size_of(gpus), "--launcher", launcher, *long)
    desk.training(run, step=20)
    desk.take_all_nodes()
    ended = desk.until(lambda s: s["state"] == "COMPLETED", run)
    first, second = ledger.attempts(desk.run(run))
    assert (first.cause, first.exit_code, second.cause) == ("preempted", 85, "done")
    assert ended["step"] == 400


def alive(run: str) -> list[Path]:
    """The processes that know of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [path] if f"/{run}\0".encode() in path.read_bytes() else []
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_is_cancelled_stays_so_and_leaves_nothing(
    desk: Desk, launcher: str, gpus: int
) -> None:
    run = start_waiting(desk, gpus, "--launcher", launcher)
    desk("cancel", run)
    desk.until(lambda s: s["state"] == "CANCELLED", run)
    wait_for(lambda: [a.action for a in ledger.attempts(desk.run(run))] == ["none"])
    wait_for(lambda: not alive(run))


def test_mpirun_starts_them_where_slurm_has_no_pmix(desk: Desk, gpus: int) -> None:
    """No stop signal reaches them there; they come back all the same."""
    srun = shutil.which("srun")
    own = desk.folder / "bin/srun"
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\ncase "$*" in *--mpi=pmix*) exit 1; esac\nexec {srun} "$@"\n')
    own.chmod(0o755)
    # As on a busy node: what labels the lines comes after the ranks' end.
    slow = "import sys, time\nif 'hpcddp.launch.mpirun_output' in sys.orig_argv: time.sleep(4)\n"
    own.with_name("sitecustomize.py").write_text(slow)
    path = f"PATH={own.parent}:{os.environ['PATH']}"
    how = ("--launcher", "mpi", "--env", path, "--env", f"PYTHONPATH={own.parent}")
    desk(
        "submit",
        "--no-snapshot",
        *size_of(gpus),
        *how,
        "--follow",
        "--",
        sys.executable,
        SCRIPT,
        "told.json",
    )
    assert json.loads((desk.folder / "told.json").read_text())["places"] == places(gpus)
    last = 2 * gpus - 1
    assert f"{last}: rank {last} of {2 * gpus}, local rank" in desk("logs", "--rank", str(last))
    run = start_waiting(desk, gpus, *how)
    desk.take_all_nodes()
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    assert [a.cause for a in ledger.attempts(desk.run(run))] == ["preempted", "done"]


COUNT = """
import os, time
here = [os.environ[name] for name in ("HPCDDP_ATTEMPT", "WORLD_SIZE", "RANK")]
open("up-" + "-".join(here), "w").close()
time.sleep(300 * (here[0] == "1"))
"""


def test_torchrun_takes_as_many_nodes_as_there_are(desk: Desk) -> None:
    """A range of nodes: each attempt's ranks are those of what Slurm gave."""
    (desk.folder / "count.py").write_text(COUNT)
    hold = ("--partition=high", "--exclusive", "--nodes=3", "--wrap=sleep 600")
    done = desk.slurm.run("sbatch", "--parsable", *hold, "--output=/dev/null", cwd=desk.folder)
    holder = done.stdout.strip()
    wait_for(lambda: "R" in desk.slurm.run("squeue", "-h", "-j", holder, "-o", "%t").stdout)
    how = ("--nodes", "1-4", "--gpus", "2", "--launcher", "torchrun", "--no-snapshot", "--json")
    out = desk("submit", *how, "--detach", "--", sys.executable, "count.py")
    run = json.loads(out.splitlines()[0])["run"]
    wait_for(lambda: len(list(desk.folder.glob("up-1-2-*"))) == 2)
    desk.slurm.run("scancel", holder)
    wait_for(lambda: not desk.slurm.run("squeue", "-h", "-j", holder).stdout)
    desk("preempt", run)
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    count = len(expand_hosts(ledger.attempts(desk.run(run))[1].nodes))
    assert count > 1
    found = {path.name for path in desk.folder.glob("up-2-*")}
    assert found == {f"up-2-{2 * count}-{rank}" for rank in range(2 * count)}
