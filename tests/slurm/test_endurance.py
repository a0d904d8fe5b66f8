"""The long ones: what takes minutes on the real Slurm. `scripts/test --full` runs them."""

import random
import time

import pytest

from hpcddp.rundir import RunDir, read_json, read_lines, step_folders, step_of

from .desk import LONG, Desk
from .test_survive import STEADY, lost

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

HOLD = 121  # seconds that Slurm holds a requeued job, by its default cred_expire


@pytest.mark.parametrize("minutes", [1])
def test_a_job_that_is_longer_than_its_time_limit(desk: Desk, minutes: int) -> None:
    """Three minutes of steps under a limit of one: it finishes by itself."""
    steps = ("--set", "max_steps=1800", "--set", "dataset.pause=0.025", "--gpus", "2")
    run = desk.submit(*steps, "--time", str(minutes), "--set", "checkpoint.every=0")
    deadline = time.monotonic() + 1200
    while (found := desk.status(run))["state"] not in ("COMPLETED", "FAILED", "TIMEOUT"):
        assert time.monotonic() < deadline, desk("why", run)
        time.sleep(1)
    assert (found["state"], found["step"]) == ("COMPLETED", 1800), desk("why", run)
    *causes, last = [a.cause for a in desk.attempts(run)]
    assert len(causes) > 2 and set(causes) == {"time limit"} and last == "done"
    assert lost(desk.run(run)) == 0
    rows = [a for a in desk.attempts(run) if a.cause != "done"]
    print([f"{(a.deadline or 0) - (a.ended or 0):.0f} s before the limit" for a in rows])


WHEN = ("pending", "start-up", "step", "save", "hold")


def test_what_a_person_cancels_never_comes_back(desk: Desk) -> None:
    """Ten jobs, two in each state, and all their ids and names watched for longer than the hold."""
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    runs: dict[str, str] = {}
    for when in WHEN * 2:
        more = ["--sbatch", "hold=true"] if when == "pending" else []
        more += ["--set", "checkpoint.every=1"] if when == "save" else []
        run = desk.submit(*LONG, *more)
        runs[run] = when
        cancel_at(desk, run, when, dice)
        if when == "pending":  # it leaves no record, and Slurm forgets it after five minutes
            desk.until(lambda s: s["state"] == "CANCELLED", run)
    deadline = time.monotonic() + HOLD + 60
    ids = {str((read_json(desk.run(run).submission) or {})["job_id"]) for run in runs}
    while time.monotonic() < deadline:
        rows = desk.slurm.run(
            "squeue", "--noheader", "--states=all", "--format=%i %j %T", check=True
        ).stdout.split("\n")
        for job, name, state in (row.split() for row in rows if row):
            if job in ids or name in runs:
                assert state in ("CANCELLED", "COMPLETING", "COMPLETED"), (runs.get(name), state)
        time.sleep(1)
    for run, when in runs.items():
        found = desk.status(run)
        words = ("CANCELLED", "LOST") if when == "pending" else ("CANCELLED",)
        assert found["state"] in words, (when, found)
        assert found["state"] in desk("why", run) or found["state"] == "LOST"
    again = next(run for run, when in runs.items() if when == "step")
    before = desk.status(again)["step"]
    desk("resume", again, "--set", f"max_steps={before + 20}", "--follow")
    assert desk.status(again)["state"] == "COMPLETED"


def cancel_at(desk: Desk, run: str, when: str, dice: random.Random) -> None:
    """scancel a run's job while it waits, starts, trains, saves, or waits to come back."""
    job = desk.until(lambda s: bool(s["job_id"]), run)["job_id"]
    folder = desk.run(run)
    if when == "start-up":
        desk.until(lambda s: s["state"] == "RUNNING", run)
        time.sleep(dice.uniform(0, 4))
    elif when == "step":
        desk.training(run, step=dice.randrange(5, 60))
    elif when == "save":
        desk.training(run, step=3)
        saving = folder.checkpoints / ".saving-1"
        deadline = time.monotonic() + 60
        while not any(saving.glob("step-*")):
            assert time.monotonic() < deadline
    elif when == "hold":
        desk.training(run, step=3)
        desk("preempt", run)
        deadline = time.monotonic() + 60
        while "COMPLETING" not in state(desk, job) and "PENDING" not in state(desk, job):
            assert time.monotonic() < deadline
        time.sleep(dice.uniform(0, 3))
    desk.slurm.run("scancel", job, check=True)


def state(desk: Desk, job: str) -> str:
    return desk.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").stdout


def saved_last(run: RunDir) -> int:
    """The attempt that saved the newest checkpoint."""
    newest = max(step_folders(run.checkpoints), key=lambda path: step_of(path) or 0)
    return int((read_json(newest / "meta.json") or {"attempt": 0})["attempt"])


def test_only_the_daemon_of_a_node_dies(desk: Desk) -> None:
    """Its ranks live on for two minutes: they write nothing into the next life."""
    run = desk.submit("--nodes", "2", *LONG, *STEADY[4:], "--set", "checkpoint.every=20")
    desk.training(run, step=50)
    node = desk.nodes[1]
    sandbox = desk.slurm.sandbox
    sandbox.stop_daemon(f"slurmd-{node}")
    try:
        deadline = time.monotonic() + 240
        while (found := desk.status(run))["attempt"] < 2 or found["step"] < 30:
            assert time.monotonic() < deadline, desk("why", run)
            time.sleep(1)
        folder = desk.run(run)
        began = desk.attempts(run)[1].began
        while saved_last(folder) != 2:  # the newer life saves
            assert time.monotonic() < deadline, desk("why", run)
            time.sleep(1)
        time.sleep(20)
        records = [r for r in read_lines(folder.attempt(1).metrics) if r["time"] > began + 5]
        assert records == [], "the older life still writes"
        assert not (folder.checkpoints / ".saving-1").exists()
        assert saved_last(folder) == 2
    finally:
        sandbox.start_daemon(f"slurmd-{node}")
    desk("cancel", run)
