"""The folder of a run on a disk that is full, read-only or away for a minute, at any moment."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir, read_json, read_lines
from hpcddp.train.checkpoint import checkpoint

from . import disks
from .desk import Desk, pids, wait_for
from .test_survive import lost, resumed

# Five runs at a time are enough for a machine: no other of these tests runs beside one.
pytestmark = [pytest.mark.full, pytest.mark.timeout(3000), pytest.mark.xdist_group("disks")]
MINUTE = 60.0
STEPS, EVERY = 400, 20
JOB = (
    "--nodes", "1", "--gpus", "2", "--set", f"max_steps={STEPS}", "--set", "dataset.pause=0.02",
    "--set", f"checkpoint.every={EVERY}", "--set", "checkpoint.keep=2", "--sbatch", "hold=true",
)  # fmt: skip
Moment = Callable[[RunDir, random.Random], None]


def begin(run: RunDir, chance: random.Random) -> None:
    """The job waits still."""


def save(run: RunDir, chance: random.Random) -> None:
    """A checkpoint is being written."""
    wait_for(lambda: ledger.newest_step(run))
    wait_for(lambda: list(run.checkpoints.glob(".saving-*/step-*")))


def end(run: RunDir, chance: random.Random) -> None:
    """A rank has just been killed: the script decides what follows."""
    wait_for(lambda: ledger.newest_step(run))
    os.kill(pids(run, run.all_attempts()[-1].number)[1], signal.SIGKILL)


def anywhere(run: RunDir, chance: random.Random) -> None:
    """It trains."""
    wait_for(lambda: ledger.newest_step(run))
    time.sleep(chance.uniform(0.0, 10.0))


MOMENTS: tuple[Moment, ...] = (*[begin] * 3, *[save] * 3, *[end] * 2, *[anywhere] * 2)


@pytest.mark.parametrize("trouble", disks.TROUBLES)
def test_a_minute_without_the_disk(desk: Desk, tmp_path: Path, trouble: str) -> None:
    """Ten runs, five at a time, each on a disk of its own."""
    found: dict[int, dict[str, Any]] = {}
    for some in (range(5), range(5, 10)):
        players = [
            threading.Thread(
                target=lambda i=i: found.update({i: play(desk, tmp_path / str(i), trouble, i)})
            )
            for i in some
        ]
        for player in players:
            player.start()
        for player in players:
            player.join()
    for i, moment in enumerate(MOMENTS):
        told = found.get(i)
        assert told, f"run {i}, {moment.__name__}: it was not played to its end"
        good = {"state": "COMPLETED", "step": STEPS, "newest": STEPS, "gone": [], "behind": []}
        whole = f"run {i}, {moment.__name__}: {json.dumps(told)}"
        assert {name: told[name] for name in good} == good, whole
        # An end that could not be written down is known by Slurm's words alone.
        causes = {begin: (["done"],), end: (["crash", "done"], ["requeued", "done"])}
        assert told["causes"] in causes.get(moment, (["done"], *causes[end])), whole
        assert told["lost"] <= (0 if told["causes"] == ["done"] else EVERY + 10), whole


def steps(names: set[str]) -> int:
    """The step of the newest of some checkpoints."""
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def play(desk: Desk, folder: Path, trouble: str, number: int) -> dict[str, Any]:
    """One run through its trouble, and what became of it."""
    chance = random.Random(number)
    with disks.small(folder):
        line = desk("submit", "toy", *JOB, "--runs", str(folder), "--json")
        run = RunDir(json.loads(line.splitlines()[0])["path"])
        job = str((read_json(run.submission) or {})["job_id"])
        if MOMENTS[number] is not begin:
            desk.slurm.run("scontrol", "release", job, check=True)
        MOMENTS[number](run, chance)
        there = {path.name for path in checkpoint.complete(run.checkpoints)}
        disks.TROUBLES[trouble](run.path)
        try:
            if MOMENTS[number] is begin:
                desk.slurm.run("scontrol", "release", job, check=True)
            time.sleep(MINUTE)
        finally:
            disks.well(run.path)
        left = {path.name for path in checkpoint.complete(run.checkpoints)}
        ended = desk.until(
            lambda s: s["state"] in ("COMPLETED", "FAILED", "LOST", "CANCELLED"), str(run.path)
        )
        lives = ledger.attempts(run)
        return {
            "state": ended["state"],
            "step": ended["step"],
            "newest": ledger.newest_step(run),
            # What was there before the trouble is there after it, unless newer ones are.
            "gone": sorted(there - left) if steps(left) < steps(there) else [],
            # Each life goes on from the newest checkpoint that was there when it began.
            "behind": [a.number for a in lives if resumed(run, a.number) != a.checkpoint],
            "lost": lost(run),
            "saves": [
                x["step"]
                for a in run.all_attempts()
                for x in read_lines(a.metrics)
                if x["event"] == "checkpoint_failed"
            ],
            "causes": [a.cause for a in lives],
        }
