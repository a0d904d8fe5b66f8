"""A controller that answers late, and loses answers, over many preemptions and cancellations."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir, read_lines, read_step

from . import slow
from .desk import HPCDDP, Desk, no_job_is_left, wait_for
from .test_hardships import site  # noqa: F401
from .test_survive import lost

Site = Callable[..., Desk]
pytestmark = [pytest.mark.full, pytest.mark.timeout(3000)]
LATE = 12.0  # seconds until an answer; Slurm's own programs wait 10 for a message
STEPS = 2500
JOB = ("--nodes", "1", "--gpus", "1", "--set", "dataset.pause=0.01")


@pytest.fixture
def busy(site: Site, request: pytest.FixtureRequest) -> Iterator[tuple[Desk, str]]:  # noqa: F811
    """A desk on a sandbox with KillWait 30, and a PATH on which Slurm is slow."""
    desk = site(nodes=4, gpus=1, kill_wait=30)
    yield desk, slow.path(desk.folder / "slow", LATE, request.param)


@pytest.mark.parametrize("busy", [0.0, 0.2], ids=["late", "late and lost"], indirect=True)
def test_twenty_preemptions_lose_nothing(busy: tuple[Desk, str]) -> None:
    """Four runs at once, five times each, at any moment since their jobs began: before the run is
    claimed, while the ranks start, in a step or in a save."""
    desk, path = busy
    chance = random.Random(7)
    words = (*JOB, "--set", f"max_steps={STEPS}", "--env", f"PATH={path}")
    names = [desk.submit(*words) for _ in range(4)]
    for number in range(5):
        wait_for(lambda: all(running(desk, name) for name in names), 300)
        time.sleep(chance.uniform(0.0, 10.0 * number))
        assert all(running(desk, name) for name in names)
        desk.take_all_nodes()
        wait_for(lambda: not any(running(desk, name) for name in names), 300)
    runs = [desk.run(name) for name in names]
    wait_for(lambda: all(desk.status(name)["state"] == "COMPLETED" for name in names), 600)
    no_job_is_left(desk)
    for run in runs:
        *causes, last = [attempt.cause for attempt in desk.attempts(run.name)]
        assert set(causes) <= {"preempted"} and last == "done", desk("why", run.name)
        assert ledger.attempts(run)[-1].restarts == 5, desk("why", run.name)
        ended = desk.status(run.name)
        assert (ended["state"], ended["step"], lost(run)) == ("COMPLETED", STEPS, 0), ended
        alone(run)


def training(desk: Desk, path: str) -> str:
    """A run that takes steps."""
    run = desk.run(desk.submit(*JOB, "--set", "max_steps=100000", "--env", f"PATH={path}"))
    wait_for(lambda: run.all_attempts() and read_step(run.attempt(1))[0], 300)
    return run.name


def starting(desk: Desk, path: str) -> str:
    """A run whose job has just begun."""
    run = desk.submit(*JOB, "--set", "max_steps=100000", "--env", f"PATH={path}")
    wait_for(lambda: running(desk, run))
    return run


def waiting(desk: Desk, path: str) -> str:
    """A run whose job has no nodes yet."""
    desk.take_all_nodes(60)
    return desk.submit(*JOB, "--set", "max_steps=100000", "--env", f"PATH={path}")


def preempted(desk: Desk, path: str) -> str:
    """A run whose job waits to come back."""
    run = training(desk, path)
    desk.take_all_nodes(60)
    wait_for(lambda: not running(desk, run))
    return run


def asked(desk: Desk, path: str) -> str:
    """A run that is about to come back by itself."""
    run = training(desk, path)
    desk("preempt", run)
    return run


@pytest.mark.parametrize("busy", [0.0, 0.2], ids=["late", "late and lost"], indirect=True)
def test_five_cancellations_are_kept(busy: tuple[Desk, str]) -> None:
    """The person's own commands are slow too; one that says that it could not is repeated."""
    desk, path = busy
    chance = random.Random(11)
    environ = desk.slurm.environ | {"PATH": path}
    slowly = replace(desk.slurm, environ=environ)
    for moment in (training, starting, waiting, preempted, asked):
        name = moment(desk, path)
        time.sleep(chance.uniform(0.0, 10.0))
        for _ in range(12):  # of two answers a fifth is lost each: four tries fail in one of 60
            done = slowly.run(HPCDDP, "cancel", name, cwd=desk.folder, timeout=300)
            if done.returncode != 3:
                break
        told = moment.__name__ + done.stdout + done.stderr
        # One whose answer was lost may have been carried out: then there is nothing left to cancel.
        assert done.returncode == 0 or "a run that is CANCELLED" in told, told
        desk.until(lambda s: s["state"] == "CANCELLED", name)
        no_job_is_left(desk)
        run = desk.run(name)
        began, deadline = len(run.all_attempts()), time.monotonic() + 45
        while time.monotonic() < deadline:
            assert desk.status(name)["state"] == "CANCELLED", told
            time.sleep(1)
        assert len(run.all_attempts()) == began, told
        no_job_is_left(desk)
        alone(run)


def running(desk: Desk, name: str) -> bool:
    """Whether a job of a run has nodes; never two of them."""
    rows = desk.slurm.run("squeue", "--noheader", f"--name={name}", "--states=R", check=True)
    assert len(rows.stdout.splitlines()) < 2, rows.stdout
    return bool(rows.stdout.strip())


def alone(run: RunDir) -> None:
    """No attempt has begun to train before those before it took their last steps."""
    for before, after in itertools.combinations(run.all_attempts(), 2):
        first = next(read_lines(after.metrics), None)
        assert first is None or read_step(before)[1] <= first["time"]
