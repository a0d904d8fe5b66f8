"""What the real Slurm says of itself, and what follows from it."""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import SandboxError
from hpcddp.rundir import RunDir, read_lines
from hpcddp.sandbox.cluster import Sandbox, Settings
from hpcddp.slurm import rules

from .conftest import clean_environ
from .desk import LONG, Desk, Slurm, make_toy, wait_for
from .test_survive import SIZE, finished, killed, lost


def test_what_a_partition_gives(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.sandbox.environ().items():
        monkeypatch.setenv(name, value)
    low, high = rules.read("low"), rules.read("high")
    assert (low.preempts, low.preempt_mode, low.grace, low.kill_wait) == (True, "REQUEUE", 10, 10)
    assert (low.notice, low.hold, low.limit) == (20, 121, "UNLIMITED")
    assert (low.outlives, low.user_signal) == (True, False)
    assert (high.preempts, high.preempt_mode) == (False, "OFF")
    assert low.version == high.version != ""
    assert rules.read() == low  # the default one


def test_a_save_that_cannot_fit_is_told_before_submitting(desk: Desk) -> None:
    asked = ("submit", "toy", "--partition", "low", "--dry-run")
    run = json.loads(desk("submit", "toy", "--follow", "--json").splitlines()[0])["path"]
    assert "warning" not in desk.result(*asked).stderr
    metrics = Path(run, "attempts/1/metrics.jsonl")
    slow = [{**line, "seconds": 95} if "seconds" in line else line for line in read_lines(metrics)]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in slow))
    told = desk.result(*asked)
    assert told.returncode == 0
    assert "warning: a preemption leaves 20 s, but a save takes 95 s" in told.stderr
    assert "warning" not in desk.result(*asked, "--partition", "high").stderr
    refuses = desk.result(*asked, "--set", "requeue.enabled=false").stderr
    assert "requeue.enabled is false" in refuses


def let_go(desk: Desk, run: str, words: str) -> str:
    """Wait until a job is told to be held, and run the command that is told; the job's id."""
    found = desk.until(lambda s: words in s["reason"], run)
    assert found["state"] == "PENDING"
    since = datetime.fromisoformat(found["since"]).timestamp()
    assert abs(time.time() - since) < 100
    command = found["reason"].rpartition(" with ")[2].split()
    assert command == ["scontrol", "release", found["job_id"]]
    assert f"waits     {found['reason']}\n" in desk("status", run)
    desk.slurm.run(*command, check=True)
    desk.until(lambda s: "release" not in s["reason"], run)
    return str(found["job_id"])


def test_a_job_that_is_held_tells_what_lets_it_go(desk: Desk) -> None:
    run = desk.submit("--sbatch", "begin=now+1hour")
    job = desk.status(run)["job_id"]
    for act, words in (("hold", "held by an administrator"), ("uhold", "held by you")):
        desk.slurm.run("scontrol", act, job, check=True)
        assert let_go(desk, run, words) == job
    desk("cancel", run)


def test_a_job_that_a_node_cannot_start_is_held_too(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hpcddp-", dir="/tmp") as parent:
        works, prolog = Path(parent, "works"), Path(parent, "prolog")
        prolog.write_text(f"#!/bin/sh\n[ -e {works} ]\n")
        prolog.chmod(0o755)
        sandbox = Sandbox(Path(parent, "box"))
        try:
            sandbox.up(Settings(nodes=2, gpus=2, accounting=False, extra={"Prolog": str(prolog)}))
            make_toy(tmp_path)
            desk = Desk(tmp_path, Slurm(sandbox, clean_environ(sandbox)))
            run = desk.submit()
            job = let_go(desk, run, "it failed to start on a node")
            works.touch()
            desk.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=True)
            assert desk.until(lambda s: s["state"] == "COMPLETED", run)["step"] == 12
        finally:
            sandbox.down()


@contextlib.contextmanager
def tracking(kind: str, folder: Path, nodes: int = 2, **settings: Any) -> Iterator[Desk]:
    """A desk on a Slurm of its own that tracks processes in a way, such as linuxproc."""
    extra = {"ProctrackType": f"proctrack/{kind}"}
    with tempfile.TemporaryDirectory(prefix="hpcddp-", dir="/tmp") as parent:
        sandbox = Sandbox(Path(parent, "box"))
        try:
            sandbox.up(Settings(nodes, gpus=2, accounting=False, extra=extra, **settings))
        except SandboxError as error:
            pytest.skip(f"no proctrack/{kind} here: {error.what}")
        names = sandbox.nodes
        try:
            make_toy(folder)
            yield Desk(folder, Slurm(sandbox, clean_environ(sandbox)))
        finally:
            sandbox.down()
            for node in names:  # slurmd leaves them
                left = Path(f"/sys/fs/cgroup/freezer/slurm_{node}")
                for path, _, _ in os.walk(left, topdown=False):
                    Path(path).rmdir()


@pytest.fixture
def tracked(slurm: Slurm, tmp_path: Path) -> Iterator[Desk]:
    """A desk on a Slurm that tracks processes by cgroups, as nearly every site does."""
    with tracking("cgroup", tmp_path) as desk:
        yield desk


@pytest.mark.full
def test_where_cgroups_track_processes_nothing_outlives_a_job(tracked: Desk) -> None:
    beat = tracked.folder / "beat"
    loop = f"trap '' TERM; while :; do date +%s >{beat}; sleep 0.1; done"
    script = tracked.folder / "job.sh"
    script.write_text(f'#!/bin/bash\nsetsid bash -c "{loop}" &>/dev/null &\nsleep 1\n')
    tracked.slurm.run("sbatch", "--wait", "--output=/dev/null", str(script), check=True)
    time.sleep(1)
    last = beat.read_text()
    time.sleep(2)
    assert beat.read_text() == last


@pytest.mark.full
def test_where_cgroups_track_processes_a_follow_up_does_not_wait(tracked: Desk) -> None:
    run = tracked.submit(*LONG, "--nodes", "2", "--gpus", "2")
    tracked.training(run, step=10)
    tracked.take_all_nodes()
    again = tracked.training(run, attempt=2)
    first, second = tracked.attempts(run)
    assert (first.cause, first.site["tracking"]) == ("preempted", "cgroup")
    assert again["job_id"] == first.successor != first.job_id
    assert first.ended and second.began - first.ended < 20
    assert again["step"] >= first.saved >= 10
    tracked("cancel", run)
    tracked.until(lambda s: s["state"] == "CANCELLED", run)


@pytest.mark.full
def test_where_cgroups_track_processes_a_killed_rank_restarts_in_place(tracked: Desk) -> None:
    run = tracked.submit(*SIZE)
    folder = RunDir(tracked.training(run, step=30)["path"])
    wait_for(lambda: killed(folder))
    finished(tracked, run)
    first, second = tracked.attempts(run)
    assert (first.cause, first.action, second.cause) == ("crash", "here", "done")
    assert (first.site["tracking"], lost(folder)) == ("cgroup", 0)
