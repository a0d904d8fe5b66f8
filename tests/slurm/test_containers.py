"""Ranks in a container with torch and without hpcddp, on the real Slurm."""

import shutil
from pathlib import Path

import images
import pytest
from sites import SUPPORT

from hpcddp.rundir import RunDir
from hpcddp.sandbox import compare

from .desk import Desk, wait_for
from .test_survive import STEADY, finished, killed, lost

# Those of the container runtimes that this machine has -> their program.
RUNTIMES = {"charliecloud": "ch-run", "apptainer": "apptainer"}
HERE = [name for name, program in RUNTIMES.items() if shutil.which(program)]
SIZE = ("--nodes", "2", "--gpus", "2")
LOOP = ("--", "python3", str(SUPPORT / "loop_script.py"), "25", "0.05")

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def image() -> Path:
    return images.made()


def inside(image: Path, runtime: str) -> tuple[str, ...]:
    """The options that lead the ranks into the image."""
    values = {"software.container.image": image, "software.container.runtime": runtime,
              "software.container.python": "python3"}  # fmt: skip
    sets = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    # Root without CAP_SYS_RESOURCE, as in a container, cannot have apptainer's usual namespaces.
    return (*sets, "--env", "APPTAINER_NO_PRIVS=1", "--env", "USER=root")


@pytest.mark.smoke("task in a container")
@pytest.mark.parametrize("runtime", HERE)
def test_a_task_in_a_container_is_preempted_and_loses_nothing(
    desk: Desk, image: Path, runtime: str
) -> None:
    slow = ("--set", "dataset.pause=0.05")  # it trains while the shell is open
    run = desk.submit(*STEADY, *slow, "--nodes", "2", *inside(image, runtime))
    desk.training(run, step=10)
    look = "import hpcddp, importlib.util as u; print(u.find_spec('torch').origin)"
    told = desk.result(
        "shell", run, "--rank", "3", text=f'test -e /complete && python3 -c "{look}"\n'
    )
    assert told.returncode == 0 and told.stdout.startswith("/usr/local/lib"), told.stderr
    desk.take_all_nodes()
    desk.training(run, attempt=2)
    folder = finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, second.cause, lost(folder)) == ("preempted", "done", 0)
    assert str(image) in folder.script.read_text()


@pytest.mark.parametrize("runtime", HERE)
def test_a_rank_killed_in_a_container_costs_no_step(desk: Desk, image: Path, runtime: str) -> None:
    run = desk.submit(*STEADY, "--nodes", "2", *inside(image, runtime))
    folder = RunDir(desk.training(run, step=30)["path"])
    wait_for(lambda: killed(folder))
    finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, second.cause) == ("crash", "here", "done")
    assert lost(folder) == 0


@pytest.mark.smoke("command in a container")
@pytest.mark.parametrize("runtime", HERE)
def test_a_command_in_a_container_is_preempted_and_loses_nothing(
    desk: Desk, image: Path, runtime: str
) -> None:
    """A loop of the user's own; another run, which nothing disturbs, ends with the same weights."""
    trace = ("--set", "train.trace=true")
    desk("submit", *SIZE, *trace, "-J", "plain", *inside(image, runtime), *LOOP)
    desk.until(lambda s: s["state"] in ("COMPLETED", "FAILED"))
    plain = desk.run()
    desk("submit", *SIZE, *trace, "-J", "hit", *inside(image, runtime), *LOOP)
    desk.training(step=10)
    desk.take_all_nodes()
    desk.until(lambda s: s["state"] in ("COMPLETED", "FAILED"))
    hit = desk.run()
    assert [attempt.cause for attempt in desk.attempts()] == ["preempted", "done"]
    assert lost(hit) == sum(compare.lost(hit).values()) == 0
    assert compare.digest(hit) == compare.digest(plain) != ""
