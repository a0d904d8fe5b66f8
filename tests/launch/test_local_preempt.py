"""Preemption and requeue on this machine, without Slurm: the same decision, the same result."""

import json
import random
import time
from pathlib import Path

import pytest
from local_runs import PATIENCE, Command, until
from sites import Site
from toy import DEEP

from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir, read_step
from hpcddp.sandbox import compare

STEPS = 150
SIZE = ("--nodes", "2", "--gpus", "2")
KEYS = f"global_batch = 8\nmax_steps = {STEPS}\n[train]\ntrace = true\n[dataset]\npause = 0.02\n"


def submitted(command: Command, launcher: str) -> RunDir:
    done = command("submit", *SIZE, "--launcher", launcher, "--detach", "--json")
    return RunDir(json.loads(done.out)["path"])


def play(command: Command, launcher: str, seed: int, preemptions: int) -> tuple[RunDir, RunDir]:
    """A run without and one with preemptions, at instants uniform from its start to its end.

    The first one is early enough to take: it is heard half a second later.
    """
    whole = submitted(command, launcher)
    began = time.monotonic()
    until(command, lambda s: s["state"] == "COMPLETED")
    length, dice = time.monotonic() - began, random.Random(seed)
    run = submitted(command, launcher)
    shares = [dice.uniform(0.1, 0.5), *(dice.random() for _ in range(preemptions - 1))]
    for instant in sorted(share * length for share in shares[:preemptions]):
        wait_for_share(run, instant / length)
        command("preempt", run.name)  # refused where it is starting over: it is being preempted
    until(command, lambda s: s["state"] in ("COMPLETED", "FAILED", "CANCELLED"))
    return whole, run


def wait_for_share(run: RunDir, share: float) -> None:
    """Until the run has come so far; what is before the first step counts as its first tenth."""
    wanted = 1 + int((share - 0.1) / 0.9 * STEPS) if share >= 0.1 else 0
    deadline = time.monotonic() + PATIENCE
    while (
        wanted > 0 and max(read_step(a)[0] for a in run.all_attempts() or [run.attempt(1)]) < wanted
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("launcher", "preemptions"),
    [
        ("fork", 2),
        pytest.param("spawn", 20, marks=[pytest.mark.full, pytest.mark.timeout(1200)]),
    ],
)
def test_preempted_here_a_run_loses_nothing(
    site: Site, command: Command, launcher: str, preemptions: int
) -> None:
    site.job("toy", KEYS, DEEP)
    seed = random.randrange(2**32)
    print("seed", seed)
    whole, run = play(command, launcher, seed, preemptions)
    causes = [a.cause for a in ledger.attempts(run)]
    assert causes[-1] == "done" and set(causes[:-1]) <= {"preempted"}
    assert len(causes) > 1 or preemptions == 0
    assert sum(compare.lost(run).values()) == 0
    assert compare.difference(whole, run, 4) == ""
    assert compare.digest(whole) == compare.digest(run) != ""
    assert not list(Path(run.checkpoints).glob(".saving-*/step-*"))
