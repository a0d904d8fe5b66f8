"""A controller that answers late, and loses answers, over many preemptions and cancellations."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from hpcddp.rundir import RunDir, read_lines, read_step

from . import slow
from .desk import Desk, wait_for
from .test_hardships import site  # noqa: F401
from .test_survive import lost

Site = Callable[..., Desk]
pytestmark = [pytest.mark.full, pytest.mark.timeout(3000)]
LATE = 12.0  # seconds until an answer; Slurm's own programs wait 10 for a message
STEPS = 1500
JOB = ("--nodes", "1", "--gpus", "1", "--set", "dataset.pause=0.01")


@pytest.fixture
def busy(site: Site, request: pytest.FixtureRequest) -> Iterator[tuple[Desk, str]]:  # noqa: F811
    """A desk on a sandbox with KillWait 30, and a PATH on which Slurm is slow."""
    desk = site(nodes=4, gpus=1, kill_wait=30)
    yield desk, slow.path(desk.folder / "slow", LATE, request.param)


@pytest.mark.parametrize("busy", [0.0, 0.2], ids=["late", "late and lost"], indirect=True)
def test_twenty_preemptions_lose_nothing(busy: tuple[Desk, str]) -> None:
    """Four runs at once, five times each, at instants that nothing else depends on."""
    desk, path = busy
    chance = random.Random(7)
    words = (*JOB, "--set", f"max_steps={STEPS}", "--env", f"PATH={path}")
    runs = [desk.run(desk.submit(*words)) for _ in range(4)]
    for number in range(1, 6):
        wait_for(lambda number=number: all(trains(run, number) for run in runs), 300)
        time.sleep(chance.uniform(0.0, 5.0))
        desk.take_all_nodes()
    wait_for(lambda: all(desk.status(run.name)["state"] == "COMPLETED" for run in runs), 600)
    for run in runs:
        causes = [attempt.cause for attempt in desk.attempts(run.name)]
        assert causes.count("preempted") == 5 and causes[-1] == "done", desk("why", run.name)
        assert (desk.status(run.name)["step"], lost(run)) == (STEPS, 0), desk("why", run.name)
        alone(run)
    wait_for(lambda: not desk.slurm.run("squeue", "--noheader").stdout)


@pytest.mark.parametrize("busy", [0.0, 0.2], ids=["late", "late and lost"], indirect=True)
def test_five_cancellations_are_kept(busy: tuple[Desk, str]) -> None:
    """While they train, and while they come back. The person's own commands are slow too."""
    desk, path = busy
    chance = random.Random(11)
    slowly = replace(desk, slurm=replace(desk.slurm, environ=desk.slurm.environ | {"PATH": path}))
    for number in range(5):
        run = desk.run(desk.submit(*JOB, "--set", "max_steps=100000", "--env", f"PATH={path}"))
        wait_for(lambda run=run: trains(run, 1), 300)
        if number % 2:
            desk("preempt", run.name)
        time.sleep(chance.uniform(0.0, 40.0))
        slowly("cancel", run.name, code=None)
        desk.until(lambda s: s["state"] == "CANCELLED", run.name)
        began, deadline = len(run.all_attempts()), time.monotonic() + 45
        while time.monotonic() < deadline:
            assert desk.status(run.name)["state"] == "CANCELLED", desk("why", run.name)
            time.sleep(1)
        assert len(run.all_attempts()) == began
        assert not desk.slurm.run("squeue", "--noheader").stdout


def trains(run: RunDir, attempt: int) -> bool:
    """Whether an attempt, or a later one, takes steps."""
    return any(
        read_step(folder)[0] for folder in run.all_attempts() if folder.number >= attempt
    )  # fmt: skip


def alone(run: RunDir) -> None:
    """No attempt has begun to train before the one before it took its last step."""
    folders = run.all_attempts()
    for before, after in itertools.pairwise(folders):
        first = next(read_lines(after.metrics), None)
        assert first is None or read_step(before)[1] <= first["time"]
