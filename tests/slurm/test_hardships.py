"""What goes wrong around a job: nodes, sites, the controller, its programs, its numbers."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcddp.rundir import read_json
from hpcddp.sandbox.cluster import Sandbox, Settings

from .conftest import clean_environ
from .desk import Desk, Slurm, make_toy, pids, wait_for
from .test_survive import SIZE, STEADY, finished, lost

Site = Callable[..., Desk]


@pytest.fixture
def site(slurm: Slurm, tmp_path: Path) -> Iterator[Site]:
    """Makes a desk on a sandbox with settings of its own."""
    with tempfile.TemporaryDirectory(prefix="hpcddp-", dir="/tmp") as parent:
        sandbox = Sandbox(Path(parent, "slurm"))

        def make(**given: Any) -> Desk:
            sandbox.up(Settings(**{"accounting": False, "nodes": 2, "gpus": 2} | given))
            make_toy(tmp_path)
            return Desk(tmp_path, Slurm(sandbox, clean_environ(sandbox)))

        try:
            yield make
        finally:
            sandbox.down()


def test_a_job_that_preemption_would_cancel_comes_back(site: Site) -> None:
    desk = site(preempt_mode="CANCEL")
    run = desk.submit(*SIZE)
    desk.training(run, step=20)
    desk.take_all_nodes()
    desk.training(run, attempt=2)
    folder = finished(desk, run)
    assert [a.cause for a in desk.attempts(run)] == ["preempted", "done"] and lost(folder) == 0


def test_without_a_grace_time_a_follow_up_goes_on(site: Site) -> None:
    desk = site(preempt_mode="CANCEL", grace=0, kill_wait=30)
    run = desk.submit(*SIZE)
    job = desk.training(run, step=20)["job_id"]
    desk.take_all_nodes()
    again = desk.training(run, attempt=2)
    assert again["job_id"] != job
    folder = finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, first.action) == ("preempted", "follow-up")
    assert first.successor and lost(folder) == 0
    if first.successor != second.job_id:  # the sentry and the end of the script submitted one each
        log = folder.job_log(first.successor)
        wait_for(lambda: log.exists() and "attempt 1 needs no follow-up job" in log.read_text())
    assert folder.name == run


@pytest.mark.full
def test_a_site_that_sends_the_jobs_own_signal(site: Site) -> None:
    desk = site(extra={"SlurmctldParameters": "preempt_send_user_signal"})
    run = desk.submit(*STEADY)
    assert "#SBATCH --signal=USR2@" in desk.run(run).script.read_text()
    desk.training(run, step=20)
    desk.take_all_nodes()
    desk.training(run, attempt=2)
    folder = finished(desk, run)
    assert [a.cause for a in desk.attempts(run)] == ["preempted", "done"] and lost(folder) == 0
    row = json.loads(desk("why", run, "--json"))["attempts"][0]
    assert row["by"] == "SIGUSR2"


def test_a_site_that_forbids_requeueing(site: Site) -> None:
    desk = site(extra={"JobRequeue": "0"})
    run = desk.submit(*STEADY)
    job = desk.training(run, step=20)["job_id"]
    desk("preempt", run)
    assert desk.training(run, attempt=2)["job_id"] == job
    assert lost(finished(desk, run)) == 0


def without(folder: Path, *programs: str) -> str:
    """A PATH without some of the programs of /usr/bin."""
    folder.mkdir()
    for path in Path("/usr/bin").iterdir():
        if path.name not in programs:
            (folder / path.name).symlink_to(path)
    return str(folder)


SAYS_CGROUP = """\
#!/bin/bash
case $* in *StartTime=now*) exit ;; esac # what ends the wait of a requeued job is gone with the job
real=$(type -ap scontrol | sed -n 2p)
"$real" "$@" | sed s,proctrack/linuxproc,proctrack/cgroup,
exit ${PIPESTATUS[0]}
"""


@pytest.mark.full
@pytest.mark.smoke("follow-up")
def test_where_no_process_outlives_a_job_a_follow_up_does_not_wait(desk: Desk) -> None:
    folder = desk.folder / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(SAYS_CGROUP)
    (folder / "scontrol").chmod(0o755)
    run = desk.submit(*STEADY, "--env", f"PATH={folder}:{desk.slurm.environ['PATH']}")
    job = desk.training(run, step=20)["job_id"]
    desk.take_all_nodes()
    again = desk.training(run, attempt=2)
    assert lost(finished(desk, run)) == 0
    first, second = desk.attempts(run)
    assert (first.cause, second.cause) == ("preempted", "done")
    assert again["job_id"] == first.successor != job
    assert first.ended and second.began - first.ended < 100  # a requeued job waits two minutes


@pytest.mark.full
@pytest.mark.smoke("follow-up without scontrol")
def test_without_scontrol_a_follow_up_goes_on(desk: Desk) -> None:
    path = without(desk.folder / "bin", "scontrol")
    run = desk.submit(*STEADY, "--env", f"PATH={path}")
    desk.training(run, step=20)
    desk.take_all_nodes()
    again = desk.training(run, attempt=2)
    assert lost(finished(desk, run)) == 0
    first, second = desk.attempts(run)
    assert (first.cause, second.cause) == ("preempted", "done")
    # Slurm 24.11 and later requeue a preempted job that ends by itself: the follow-up job then
    # starts after it, and has nothing to do.
    assert first.successor and (again["job_id"] == first.successor or second.restarts == 1)
    wait_for(lambda: not desk.slurm.run("squeue", "--noheader").stdout)
    assert len(desk.attempts(run)) == 2


@pytest.mark.full
def test_the_ranks_need_no_scontrol(desk: Desk) -> None:
    path = without(desk.folder / "bin", "scontrol", "sbatch", "squeue", "scancel")
    (desk.folder / "mine.sh.j2").write_text(
        '{% extends "slurm.sh.j2" %}{% block setup %}{{ super() }}real=$PATH\n{% endblock %}'
        f"{{% block launch %}}export PATH={path}\n{{{{ super() }}}}export PATH=$real\n"
        "{% endblock %}"
    )
    run = desk.submit(*STEADY, "--template", "mine.sh.j2")
    job = desk.training(run, step=20)["job_id"]
    desk("preempt", run)
    assert desk.training(run, attempt=2)["job_id"] == job
    assert lost(finished(desk, run)) == 0


def test_without_the_environment_the_decision_is_made_all_the_same(desk: Desk) -> None:
    """Its Python is gone when the ranks leave; the system's decides."""
    python = desk.folder / "python"
    python.symlink_to(shutil.which("python") or "")
    rendered = desk.render(*STEADY)
    run, script = rendered.name, rendered.script
    text = script.read_text()
    line = next(x for x in text.splitlines() if x.startswith("readonly PYTHON="))
    script.write_text(text.replace(line, f"readonly PYTHON={python}"))
    job = desk.sbatch(script)
    desk.training(run, step=20)
    python.unlink()
    desk.slurm.run("scancel", "--signal=USR2", job, check=True)
    desk.training(run, attempt=2)
    first = desk.attempts(run)[0]
    assert (first.cause, first.action) == ("signalled", "requeue")
    assert lost(finished(desk, run)) == 0


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0, 30])
def test_a_controller_that_is_away_while_the_job_leaves(desk: Desk, seconds: float) -> None:
    run = desk.submit(*STEADY)
    job = desk.training(run, step=20)["job_id"]
    folder = desk.run(run)
    desk.slurm.sandbox.stop_daemon("slurmctld")
    try:
        for pid in pids(folder):
            os.kill(pid, signal.SIGUSR2)
        wait_for(lambda: "asking again" in folder.log.read_text())
        time.sleep(seconds)
    finally:
        desk.slurm.sandbox.start_daemon("slurmctld")
    assert desk.training(run, attempt=2)["job_id"] == job
    assert lost(finished(desk, run)) == 0


@pytest.mark.smoke("array")
def test_each_element_of_an_array_comes_back_alone(desk: Desk) -> None:
    script = desk.folder / "job.sbatch"
    script.write_text(desk("render", "toy", *STEADY, "--set", "max_steps=300"))
    done = desk.slurm.run(
        "sbatch", "--parsable", "--array=0-1", str(script), cwd=desk.folder, check=True
    )
    array = done.stdout.strip()
    name = Path(next(iter(desk.folder.glob("runs/toy-*")))).name.split("_")[0]
    for task in (0, 1):
        wait_for(lambda path=desk.folder / f"runs/{name}_{task}/job.json": path.exists())
        desk.training(f"{name}_{task}", step=10)
    desk.slurm.run("scancel", "--signal=USR2", f"{array}_1", check=True)
    desk.training(f"{name}_1", attempt=2)
    for task in (0, 1):
        ended = desk.until(lambda s: s["state"] == "COMPLETED", f"{name}_{task}")
        assert (ended["step"], ended["job_id"]) == (300, f"{array}_{task}")
    assert [a.cause for a in desk.attempts(f"{name}_0")] == ["done"]
    assert [a.cause for a in desk.attempts(f"{name}_1")] == ["signalled", "done"]
    assert lost(desk.run(f"{name}_1")) == 0


@pytest.mark.full
def test_a_rank_that_stands_still_is_found_and_the_job_comes_back(desk: Desk) -> None:
    keys = ("train.hang_seconds=3", "checkpoint.every=10", "requeue.exclude_bad_nodes=true")
    run = desk.submit(*STEADY, *(word for key in keys for word in ("--set", key)))
    desk.training(run, step=30)
    folder = desk.run(run)
    stopped = pids(folder)[1]
    os.kill(stopped, signal.SIGSTOP)
    desk.training(run, attempt=2)
    assert [a.cause for a in desk.attempts(run)][:1] == ["hang"]
    found = read_json(folder.attempt(1).hang) or {}
    assert found["suspect"]["rank"] == 1
    assert "stopped" in folder.attempt(1).stack(1).read_text()
    assert "rank 1" in desk("why", run)
    finished(desk, run)
    first, second = desk.attempts(run)
    assert second.nodes != first.nodes


def test_numbers_gone_wrong_end_the_run(desk: Desk) -> None:
    bad = "\nn, good = 0, loss\ndef loss(output, target):\n    global n\n    n += 1\n"
    bad += "    return good(output, target) * (float('nan') if n == 30 else 1)\n"
    task = desk.folder / "jobs/toy.py"
    task.write_text(task.read_text() + bad)
    run = desk.submit(*STEADY, "--set", "checkpoint.every=10")
    ended = desk.until(lambda s: s["state"] == "FAILED", run)
    (only,) = desk.attempts(run)
    assert (only.cause, only.action) == ("diverged", "none")
    assert 20 <= only.saved < 30
    assert "Diverged" in ended["reason"]
