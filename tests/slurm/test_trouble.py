"""Ordinary trouble of a cluster: a slow controller, a disk that is away, a killed script."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir, read_json
from hpcddp.sandbox import own_processes

from . import disks, slow
from .desk import LONG, Desk, no_job_is_left, pids, wait_for
from .test_hardships import site  # noqa: F401
from .test_policy import tracked  # noqa: F401
from .test_survive import SIZE, finished, lost

Site = Callable[..., Desk]


@pytest.mark.parametrize(
    ("seconds", "errors", "verb"),
    [(0, 2.0, "requeue"), pytest.param(12, 0.0, "", marks=pytest.mark.full)],
    ids=["lost", "late"],
)
def test_a_slow_answer_starts_no_second_job(
    site: Site,  # noqa: F811
    seconds: float,
    errors: float,
    verb: str,
) -> None:
    """Slurm has done what it was asked long before it says so, or does not say so at all."""
    desk = site(kill_wait=30)
    path = slow.path(desk.folder / "slow", seconds, errors, verb=verb)
    run = desk.submit(*SIZE, "--env", f"PATH={path}")
    job = desk.training(run, step=20)["job_id"]
    desk("preempt", run)
    assert desk.training(run, attempt=2)["job_id"] == job
    folder = finished(desk, run)
    assert [a.cause for a in desk.attempts(run)] == ["preempted", "done"] and lost(folder) == 0
    no_job_is_left(desk)


@pytest.mark.full
def test_a_slow_answer_starts_no_second_job_where_nothing_outlives_one(tracked: Desk) -> None:  # noqa: F811
    """There a follow-up is the first way to come back."""
    desk = tracked
    path = slow.path(desk.folder / "slow", 12)
    run = desk.submit(*SIZE, *LONG, "--env", f"PATH={path}")
    told = desk.run(run).attempt(1).slurm
    wait_for(lambda: "site" in (read_json(told) or {}))  # begin could not wait for the answers
    desk.training(run, step=20)
    desk("preempt", run)
    desk.training(run, attempt=2)
    desk("stop", run)
    desk.until(lambda s: s["state"] == "STOPPED", run)
    folder = desk.run(run)
    first, second = desk.attempts(run)
    assert [first.cause, second.cause] == ["preempted", "stopped"] and lost(folder) == 0
    assert second.job_id == first.successor != first.job_id
    no_job_is_left(desk)
    assert not any(Path(attempt.node_log).exists() for attempt in (first, second))


def test_a_follow_up_that_nobody_heard_of_is_cancelled(desk: Desk) -> None:
    """sbatch took the job, and its answer was lost."""
    path = slow.path(desk.folder / "slow", 0, errors=2.0, only=("sbatch",))
    run = desk.submit(*SIZE, *LONG, "--env", f"PATH={path}")
    desk.training(run, step=10)
    folder = desk.run(run)
    script = str(folder.script)
    waits = desk.slurm.run(
        "sbatch", "--parsable", "--hold", script, "1", cwd=desk.folder, check=True
    )
    desk("cancel", run)
    desk.until(lambda s: s["state"] == "CANCELLED", run)
    no_job_is_left(desk)
    assert waits.stdout.strip() and len(desk.attempts(run)) == 1


def test_a_second_job_takes_no_request_away(desk: Desk) -> None:
    run = desk.submit(*SIZE, *LONG)
    desk.training(run, step=10)
    folder = desk.run(run)
    ranks = pids(folder)
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        desk("stop", run)
        done = desk.slurm.run("sbatch", "--wait", str(folder.script), cwd=desk.folder)
        assert done.returncode == 1 and folder.request.exists()
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
    desk.until(lambda s: s["state"] == "STOPPED", run)
    assert [a.cause for a in desk.attempts(run)] == ["stopped"]


@pytest.mark.parametrize("seconds", [8.0, pytest.param(0.0, marks=pytest.mark.full)],
                         ids=["a step too long", "while it starts"])  # fmt: skip
def test_a_preemption_without_time_is_followed(site: Site, seconds: float) -> None:  # noqa: F811
    """Slurm kills the ranks and the script before they could say anything."""
    desk = site(preempt_mode="CANCEL", grace=0, kill_wait=5)
    task = desk.folder / "jobs/toy.py"
    slow_step = (
        f"\nfast = loss\ndef loss(o, t):\n    n = time.sleep({seconds})\n    return fast(o, t)\n"
    )
    slow_start = "\nplain = model\ndef model():\n    time.sleep(15)\n    return plain()\n"
    task.write_text(task.read_text() + (slow_step if seconds else slow_start))
    run = desk.submit("--nodes", "2", "--gpus", "1", "--set", "max_steps=3")
    if seconds:
        desk.training(run, step=1)
    else:
        desk.until(lambda s: s["state"] == "RUNNING" and s["attempt"] == 1, run)
    desk.take_all_nodes()
    desk.until(lambda s: s["attempt"] == 2, run)
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    first, second = desk.attempts(run)
    assert (first.cause, second.cause) == ("preempted", "done")
    assert first.job_id != second.job_id
    no_job_is_left(desk)


BROKEN = """
import os
if os.environ.get("HPCDDP_ATTEMPT") == "2" and os.environ["SLURM_PROCID"] == "1":
    raise ImportError("its disk was away")
"""


@pytest.mark.full
def test_an_error_of_one_rank_after_progress_is_a_crash_of_its_node(desk: Desk) -> None:
    task = desk.folder / "jobs/toy.py"
    task.write_text(task.read_text() + BROKEN)
    run = desk.submit(*SIZE)
    desk.training(run, step=20)
    desk("preempt", run)
    folder = finished(desk, run)
    assert [a.cause for a in desk.attempts(run)] == ["preempted", "crash", "done"]
    assert lost(folder) == 0
    refused = desk.result("resume", run, "--set", "model.width=16")
    assert refused.returncode == 2 and desk.status(run)["state"] == "COMPLETED"
    assert len(desk.attempts(run)) == 3


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_command_that_fails_alike_on_all_nodes_is_a_mistake_at_once(
    desk: Desk, late: int
) -> None:
    """Of several nodes srun may end some ranks before they have spoken; so it may a rank that is
    late, and then Slurm speaks in its place."""
    wait = f"import os, time\ntime.sleep({late} * (os.environ['RANK'] == '0'))\n"
    (desk.folder / "train.py").write_text(wait + "import nowhere\n")
    size = ("--nodes", "1", "--gpus", "2", "--follow")
    assert desk.result("submit", *size, "--", "python", "train.py").returncode == 1
    assert [a.cause for a in desk.attempts()] == ["mistake"]
    assert "No module named 'nowhere'" in desk("why")


@pytest.mark.full
def test_a_script_that_is_killed_is_followed_where_nothing_outlives_it(
    tracked: Desk,  # noqa: F811
) -> None:
    """The sentry dies with the job: a rank that leaves does its work."""
    test_a_script_that_is_killed_is_followed(tracked)


def test_a_script_that_is_killed_is_followed(desk: Desk) -> None:
    run = desk.submit(*SIZE)
    desk.training(run, step=20)
    os.kill(desk.attempts(run)[0].pid, signal.SIGKILL)
    desk.training(run, attempt=2)
    folder = finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, second.cause) == ("script killed", "done") and lost(folder) == 0
    assert "script killed" in desk("why", run)


def test_a_script_that_scancel_ends_is_not(site: Site) -> None:  # noqa: F811
    """The ranks save and leave within KillWait; the script, told to wait for them, is killed."""
    desk = site(kill_wait=3)
    run = desk.submit(*SIZE, *LONG)
    job = desk.training(run, step=20)["job_id"]
    ranks = pids(desk.run(run))
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    desk.slurm.run("scancel", job, check=True)
    desk.until(lambda s: s["state"] == "CANCELLED", run)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        assert desk.status(run)["state"] == "CANCELLED"
    no_job_is_left(desk)


@pytest.mark.full
def test_the_loss_of_the_scripts_node_costs_no_wait(desk: Desk) -> None:
    """Slurm notices it after half a minute, and holds the job for two more: a rank on the second
    node ends that."""
    run = desk.submit(*SIZE, *LONG)
    desk.training(run, step=20)
    node, sandbox = desk.attempts(run)[0].host, desk.slurm.sandbox
    sandbox.stop_daemon(f"slurmd-{node}", signal.SIGKILL)
    try:
        while left := own_processes.of_jobs(str(sandbox.logs.parent), node):
            own_processes.end(left, signal.SIGKILL, 1.0)
        desk.until(lambda s: s["state"] == "PENDING", run)
        free = time.monotonic()
        desk.training(run, attempt=2)
        assert time.monotonic() - free < 40
    finally:
        sandbox.start_daemon(f"slurmd-{node}")
    desk("cancel", run)
    desk.until(lambda s: s["state"] == "CANCELLED", run)


@pytest.mark.full
def test_a_time_limit_that_is_changed_is_known_within_a_minute(desk: Desk) -> None:
    run = desk.submit(*SIZE, *LONG, "--time", "60")
    job = desk.training(run, step=10)["job_id"]
    before, told = desk.attempts(run)[0].deadline, desk.run(run).attempt(1).slurm
    desk.slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=40", check=True)
    wait_for(lambda: (read_json(told) or {}).get("deadline"), 60)
    assert before and (read_json(told) or {})["deadline"] == before - 20 * 60
    desk("cancel", run)
    desk.until(lambda s: s["state"] == "CANCELLED", run)


STEPS = ("--set", "max_steps=80", "--set", "dataset.pause=0.02", "--set", "checkpoint.every=10",
         "--set", "checkpoint.keep=2", "--nodes", "1", "--gpus", "2")  # fmt: skip


def some(name: str) -> list[Any]:
    """The troubles of a disk; in each run of the tests only one of them."""
    return [
        name if name == other else pytest.param(other, marks=pytest.mark.full)
        for other in disks.TROUBLES
    ]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with disks.small(tmp_path / "disk") as folder:
        yield folder


def submitted(desk: Desk, disk: Path, *more: str) -> RunDir:
    """A run whose job waits until it is let go."""
    line = desk(
        "submit", "toy", *STEPS, "--runs", str(disk), "--sbatch", "hold=true", "--json", *more
    )
    return RunDir(json.loads(line.splitlines()[0])["path"])


def impatient(desk: Desk, run: RunDir) -> str:
    """Submit the run's script anew with seconds in place of minutes; the job's id."""
    text = run.script.read_text().replace("SECONDS + 180", "SECONDS + 1")
    run.script.write_text(text.replace("now+10minutes", "now+8"))
    desk.slurm.run("scancel", str((read_json(run.submission) or {})["job_id"]), check=True)
    return desk.sbatch(run.script)


def complete(desk: Desk, run: RunDir) -> dict[str, Any]:
    """Wait for the end of a run in a folder of its own."""
    return desk.until(lambda s: s["state"] in ("COMPLETED", "FAILED", "LOST"), str(run.path))


@pytest.mark.parametrize("trouble", some("full"))
def test_a_disk_that_is_no_use_while_the_job_begins(desk: Desk, disk: Path, trouble: str) -> None:
    run = submitted(desk, disk)
    job = str((read_json(run.submission) or {})["job_id"])
    disks.TROUBLES[trouble](run.path)
    try:
        desk.slurm.run("scontrol", "release", job, check=True)
        daemons = (desk.slurm.sandbox.daemon(f"slurmd-{node}") for node in desk.nodes)
        # Each node has a /tmp of its own.
        name = f"hpcddp-{run.name}-{job}.log"
        logs = [Path(f"/proc/{daemon.pid}/root/tmp/{name}") for daemon in daemons]
        told = "" if trouble == "away" else "hpcddp:"
        wait_for(lambda: any(log.exists() and told in log.read_text() for log in logs))
        time.sleep(1)
    finally:
        disks.well(run.path)
    assert complete(desk, run)["state"] == "COMPLETED"
    assert [a.cause for a in ledger.attempts(run)] == ["done"]


@pytest.mark.full
def test_a_disk_that_stays_away_holds_no_nodes(desk: Desk, disk: Path) -> None:
    """The job waits in the queue instead, and its comment keeps the count."""
    run = submitted(desk, disk, "--sbatch", "comment=of ours")
    job = impatient(desk, run)
    disks.away(run.path)
    try:
        desk.slurm.run("scontrol", "release", job, check=True)
        wait_for(lambda: "try 1 of 12, restart 0]" in comment(desk, job))
        wait_for(lambda: "try 2 of 12, restart 1]" in comment(desk, job))
    finally:
        disks.well(run.path)
    assert complete(desk, run)["state"] == "COMPLETED"
    assert comment(desk, job).startswith("of ours [hpcddp: try ")


@pytest.mark.full
def test_a_disk_that_stays_away_has_another_job_wait_where_nothing_outlives_one(
    tracked: Desk,  # noqa: F811
    disk: Path,
) -> None:
    desk = tracked
    run = submitted(desk, disk)
    first = impatient(desk, run)
    disks.away(run.path)
    try:
        desk.slurm.run("scontrol", "release", first, check=True)
        wait_for(lambda: "try 2 of 12, restart -1]" in comment(desk))
    finally:
        disks.well(run.path)
    assert complete(desk, run)["state"] == "COMPLETED"
    assert [(a.cause, a.job_id != first) for a in ledger.attempts(run)] == [("done", True)]


def comment(desk: Desk, job: str = "") -> str:
    return desk.slurm.run(
        "squeue", "--noheader", "--states=all", "--format=%k", *([f"--jobs={job}"] if job else [])
    ).stdout


@pytest.mark.parametrize("trouble", some("away"))
def test_a_crash_while_the_disk_is_no_use_comes_back(desk: Desk, disk: Path, trouble: str) -> None:
    line = desk("submit", "toy", *STEPS, "--runs", str(disk), "--json")
    run = RunDir(json.loads(line.splitlines()[0])["path"])
    wait_for(lambda: ledger.newest_step(run))
    os.kill(pids(run)[1], signal.SIGKILL)
    disks.TROUBLES[trouble](run.path)
    try:
        time.sleep(8)
    finally:
        disks.well(run.path)
    ended = complete(desk, run)
    assert (ended["state"], ended["step"]) == ("COMPLETED", 80)
    assert lost(run) <= 20
