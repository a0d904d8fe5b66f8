"""After a failure of ranks, the next attempt starts in the same allocation: nothing is queued."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcddp.attempt import ledger, sentry
from hpcddp.rundir import RunDir
from hpcddp.sandbox import own_processes
from hpcddp.slurm.hostlist import expand_hosts

from .desk import LONG, Desk, pids, wait_for
from .test_survive import SIZE, STEADY, finished, killed, lost, resumed

HERE = ("--set", "requeue.here=true", "--set", "checkpoint.every=20")


def restarts(desk: Desk, job_id: str) -> str:
    """Slurm's count of a job's requeues."""
    words = desk.slurm.run("scontrol", "--oneliner", "show", "job", job_id, check=True).stdout
    return next(word for word in words.split() if word.startswith("Restarts="))


def sentries(run: RunDir) -> list[str]:
    """The process ids of the sentries beside a run's script."""
    there = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if (
                str(run.host).encode() in words
                and (path / "comm").read_text().strip() == sentry.NAME
            ):
                there.append(path.name)
    return there


def test_a_killed_rank_restarts_in_place_and_a_preemption_follows(desk: Desk) -> None:
    run = desk.submit(*SIZE, *HERE, "--launcher", "srun")
    told = desk.training(run, step=30)
    folder = RunDir(told["path"])
    wait_for(lambda: killed(folder))
    desk.training(run, attempt=2)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, second.job_id) == ("crash", "here", first.job_id)
    assert first.ended and second.began - first.ended < 5  # a requeued job waits longer
    assert (restarts(desk, first.job_id), resumed(folder, 2)) == ("Restarts=0", first.saved)
    assert second.said == first.said and second.deadline == first.deadline
    wait_for(lambda: len(sentries(folder)) == 1)
    desk.take_all_nodes()
    finished(desk, run)
    first, second, third = desk.attempts(run)
    assert (second.cause, second.action) == ("preempted", "requeue")
    assert (third.cause, third.job_id, resumed(folder, 3)) == ("done", first.job_id, second.saved)
    assert lost(folder) <= 20 + 12  # by the kill alone
    assert "crash" in desk("why", run) and "here" in desk("why", run)


def parents(run: RunDir, attempt: int) -> set[int]:
    """The processes that have forked the ranks of an attempt."""
    found = set()
    for pid in pids(run, attempt):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            found.add(int(stat.rpartition(")")[2].split()[1]))
    return found


def test_a_killed_rank_costs_no_step_and_no_import(desk: Desk) -> None:
    run = desk.submit(*SIZE, *HERE)
    folder = RunDir(desk.training(run, step=30)["path"])
    before = parents(folder, 1)
    wait_for(lambda: killed(folder))
    desk.training(run, attempt=2)
    assert parents(folder, 2) == before and len(before) == 2
    finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, second.cause) == ("crash", "here", "done")
    assert first.saved == resumed(folder, 2) and lost(folder) == 0
    assert "saved by rank" in folder.attempt(1).log.read_text()


@contextlib.contextmanager
def without(desk: Desk, node: str) -> Iterator[None]:
    """Kill a node's daemon, and all of its jobs' processes."""
    sandbox = desk.slurm.sandbox
    sandbox.stop_daemon(f"slurmd-{node}", signal.SIGKILL)
    try:
        while left := own_processes.of_jobs(str(sandbox.logs.parent), node):
            own_processes.end(left, signal.SIGKILL, 1.0)
        yield
    finally:
        sandbox.start_daemon(f"slurmd-{node}")


@contextlib.contextmanager
def silent(desk: Desk, node: str) -> Iterator[None]:
    """Pause a node, as without power: it is known by its silence alone."""
    sandbox = desk.slurm.sandbox
    home = str(sandbox.logs.parent)
    paused = [sandbox.daemon(f"slurmd-{node}"), *own_processes.of_jobs(home, node)]
    own_processes.send(paused, signal.SIGSTOP)
    try:
        yield
    finally:
        own_processes.send(paused, signal.SIGCONT)


@pytest.mark.parametrize("lose", [without, silent])
def test_a_spare_takes_the_place_of_a_lost_node(
    desk: Desk, lose: Callable[[Desk, str], contextlib.AbstractContextManager[None]]
) -> None:
    run = desk.submit(*SIZE, "--spares", "1", "--set", "checkpoint.every=20")
    folder = RunDir(desk.training(run, step=30)["path"])
    (first,) = desk.attempts(run)
    names = expand_hosts(first.nodes)
    with lose(desk, names[1]):
        desk.training(run, attempt=2)
        finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, second.cause) == ("lost node", "here", "done")
    assert first.job_id == second.job_id
    assert names[1] not in expand_hosts(second.nodes) and len(expand_hosts(second.nodes)) == 2
    assert lost(folder) == 0


def test_a_node_that_was_silent_is_a_spare_again(desk: Desk) -> None:
    """Its old parent lives on, and holds nothing that the new one needs."""
    run = desk.submit(*SIZE, "--spares", "1", *LONG)
    folder = RunDir(desk.training(run, step=30)["path"])
    node = expand_hosts(desk.attempts(run)[0].nodes)[1]
    with silent(desk, node):
        desk.training(run, attempt=2)
    wait_for(lambda: f"{node} is back, as a spare" in folder.attempt(2).log.read_text())
    desk("cancel", run)
    desk.until(lambda s: s["state"] == "CANCELLED", run)


@pytest.mark.full
def test_a_range_of_nodes_continues_with_fewer_and_grows_again(desk: Desk) -> None:
    # With one task per node, Slurm 22.05 gives no more nodes than it must.
    run = desk.submit(*STEADY, "--nodes", "1-2", "--set", "checkpoint.every=20")
    folder = RunDir(desk.training(run, step=30)["path"])
    (first,) = desk.attempts(run)
    names = expand_hosts(first.nodes)
    with without(desk, names[1]):
        desk.training(run, attempt=2)
    first, second = desk.attempts(run)
    assert (first.cause, first.action) == ("lost node", "here")
    assert first.job_id == second.job_id
    assert expand_hosts(second.nodes) == names[:1] and len(names) == 2
    desk.take_all_nodes()
    desk.training(run, attempt=3)
    third = desk.attempts(run)[-1]
    assert len(expand_hosts(third.nodes)) == 2 and lost(folder) == 0
    finished(desk, run)


# As for torchrun; it saves to a file of its own each epoch, and knows nothing of hpcddp.
USUAL = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    first = saved["epoch"] + 1
    model.load_state_dict(saved["model"])
for epoch in range(first, 30):
    for _ in range(10):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "model": model.state_dict()}, "new.pt")
        os.replace("new.pt", "last.pt")
        print("epoch", epoch, "of attempt", os.environ["HPCDDP_ATTEMPT"], flush=True)
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "command",
    [(sys.executable, "train.py"), pytest.param(("sh", "train.sh"), marks=pytest.mark.full)],
    ids=["python", "shell"],
)
def test_a_usual_script_continues_from_its_own_file_in_place(
    desk: Desk, command: tuple[str, ...]
) -> None:
    (desk.folder / "train.py").write_text(USUAL)
    (desk.folder / "train.sh").write_text(f"{sys.executable} train.py\n")
    words = ("--nodes", "2", "--gpus", "2", "--spares", "1", "--no-snapshot", "--detach", "--json")
    out = desk("submit", *words, "--", *command)
    run = json.loads(out.splitlines()[0])["run"]
    wait_for(lambda: "epoch 5 of attempt 1" in desk.run(run).log.read_text())
    names = expand_hosts(desk.attempts(run)[0].nodes)
    with without(desk, names[1]):
        desk.until(lambda s: s["state"] == "COMPLETED", run)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, second.cause) == ("lost node", "here", "done")
    assert first.job_id == second.job_id and restarts(desk, first.job_id) == "Restarts=0"
    log = desk.run(run).attempt(2).log.read_text()
    assert "epoch 29 of attempt 2" in log and "epoch 4 of attempt 2" not in log


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.full)])
def test_each_launcher_restarts_in_place(desk: Desk, launcher: str) -> None:
    run = desk.submit(*SIZE, *HERE, "--launcher", launcher)
    folder = RunDir(desk.training(run, step=30)["path"])
    wait_for(lambda: killed(folder))
    finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, second.cause) == ("crash", "here", "done")
    assert restarts(desk, first.job_id) == "Restarts=0"


def test_what_a_person_cancels_in_the_middle_of_it_stays_so(desk: Desk) -> None:
    run = desk.submit(*LONG, *SIZE[4:], *HERE)
    told = desk.training(run, step=30)
    folder = RunDir(told["path"])
    os.kill(pids(folder)[1], signal.SIGKILL)

    def restarting() -> bool:
        first = ledger.read(folder.attempt(1))
        return bool(first and first.action == "here")

    wait_for(restarting)
    desk.slurm.run("scancel", told["job_id"], check=True)
    desk.until(lambda s: s["state"] == "CANCELLED", run)
    wait_for(lambda: not desk.slurm.run("squeue", "--noheader", check=True).stdout)
    assert len(desk.attempts(run)) <= 2
