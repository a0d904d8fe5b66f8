"""Whole rehearsals, each on a sandbox that it starts and ends itself."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from toy import DEEP

from hpcddp.rundir import read_lines
from hpcddp.sandbox import own_processes

from .conftest import Slurm
from .desk import HPCDDP, make_toy

# About 50 steps a second, and steps that a crash costs.
STEADY = ("--set", "dataset.pause=0.005", "--set", "checkpoint.every=20")


@pytest.fixture
def user(slurm: Slurm, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A user's folder and his environment, which points at a Slurm that is not to be touched."""
    make_toy(tmp_path)
    return tmp_path, slurm.environ


def rehearse(user: tuple[Path, dict[str, str]], *args: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the object of the last line, and the talk."""
    folder, environ = user
    done = subprocess.run(
        [HPCDDP, "rehearse", "toy", "--nodes", "2", *STEADY, *args, "--json"],
        cwd=folder, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def next_job(slurm: Slurm) -> str:
    """The next id of the Slurm that is not to be touched: old jobs it forgets."""
    config = slurm.run("scontrol", "show", "config", check=True).stdout
    return re.findall(r"^NEXT_JOB_ID\s*=\s*(\d+)", config, re.MULTILINE)[0]


@pytest.mark.timeout(400)
def test_a_job_survives_and_is_what_it_would_have_been(
    user: tuple[Path, dict[str, str]], slurm: Slurm
) -> None:
    before = next_job(slurm)
    code, found, talk = rehearse(
        user, "--set", "max_steps=200", "--gpus", "1", "--preempt", "1", "--crash", "1",
        "--cancel", "1", "--seed", "5", "--watch", "3",
    )  # fmt: skip
    assert code == 0, (found, talk)
    assert found["seed"] == 5 and sorted(f["fault"] for f in found["faults"]) == [
        "cancel", "crash", "preempt",
    ]  # fmt: skip
    causes = {f["fault"]: (f["cause"], f["survived"]) for f in found["faults"]}
    assert causes["cancel"] == ("cancelled", True) and causes["preempt"] == ("preempted", True)
    cost = {f["fault"]: f["steps_lost"] for f in found["faults"]}
    assert (cost["preempt"], cost["cancel"]) == (0, 0)
    assert found["steps_lost"] == cost["crash"] <= 20 + 40  # since the last save, up to the kill
    assert found["weights_equal"] and found["order_equal"]
    assert next_job(slurm) == before


@pytest.mark.full
def test_a_job_that_remembers_nothing_fails_it(user: tuple[Path, dict[str, str]]) -> None:
    """Samples that differ from life to life: the loss after the fault is another one."""
    folder, _ = user
    task = folder / "jobs/toy.py"
    task.write_text(task.read_text() + """
import os
BEFORE = Pairs.__getitem__
LIFE = int(os.environ["HPCDDP_ATTEMPT"])
Pairs.__getitem__ = lambda self, i: (BEFORE(self, i)[0] + LIFE, self.y[i])
""")  # fmt: skip
    code, found, talk = rehearse(
        user, "--set", "max_steps=100", "--gpus", "1", "--preempt", "1", "--seed", "2",
        "--runs", str(folder / "kept"),
    )  # fmt: skip
    assert code == 1, (found, talk)
    assert found["faults"][0]["survived"] and found["steps_lost"] == 0
    assert not found["weights_equal"] and not found["order_equal"]
    assert "attempt 2" in found["difference"]
    assert len(list((folder / "kept").iterdir())) == 2


def test_a_job_that_fails_by_itself_is_told_with_its_reason(
    user: tuple[Path, dict[str, str]],
) -> None:
    folder, environ = user
    task = folder / "jobs/toy.py"
    task.write_text(task.read_text() + "\ndef model():\n    raise ValueError('no such layer')\n")
    done = subprocess.run(
        [HPCDDP, "rehearse", "toy", "--crash", "1", "--runs", str(folder / "kept")],
        cwd=folder, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and not done.stdout
    assert "ValueError: no such layer" in done.stderr and "Traceback" not in done.stderr


def records(runs: Path) -> list[dict[str, Any]]:
    """The metrics of the first attempt of the first run that has any."""
    return [line for f in runs.glob("*/attempts/1/metrics.jsonl") for line in read_lines(f)]


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_everything_ends_with_it(user: tuple[Path, dict[str, str]], sig: signal.Signals) -> None:
    folder, environ = user
    argv = [HPCDDP, "rehearse", "toy", *STEADY, "--set", "max_steps=100000", "--crash", "1"]
    with subprocess.Popen(
        [*argv, "--runs", str(folder / "kept")], cwd=folder, env=environ, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as running:  # fmt: skip
        try:
            deadline = time.monotonic() + 200
            while not (lines := records(folder / "kept")):
                assert running.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            started = own_processes.descendants([running.pid])
            ranks = own_processes.of_pids(r["pid"] for r in lines[0]["ranks"])
            assert started and ranks and all(rank.alive() for rank in ranks)
            running.send_signal(sig)
            _, talk = running.communicate(timeout=60)
            assert running.returncode == 130 and "Traceback" not in talk
        finally:
            running.kill()
    assert not [p for p in (*started, *ranks) if p.alive()]


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_all_faults(user: tuple[Path, dict[str, str]]) -> None:
    code, found, talk = rehearse(
        user, "--set", "max_steps=1500", "--gpus", "2", "--preempt", "3", "--kill-node", "1",
        "--timeout", "1", "--crash", "1", "--hang", "1", "--cancel", "1",
    )  # fmt: skip
    assert code == 0, (found, talk)
    assert len(found["faults"]) == 8 and all(f["survived"] for f in found["faults"])


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_twenty_preemptions(user: tuple[Path, dict[str, str]]) -> None:
    """From submission to the end: in start-ups, evaluations and saves too."""
    (user[0] / "jobs/toy.py").write_text(DEEP)
    size = ("--set", "max_steps=1500", "--set", "dataset.size=200", "--gpus", "2")
    code, found, talk = rehearse(user, *size, "--preempt", "20")
    assert code == 0, (found, talk)
    assert [(f["cause"], f["survived"]) for f in found["faults"]] == [("preempted", True)] * 20
    assert found["steps_lost"] == 0
    assert found["weights_equal"] and found["order_equal"]
    print(talk)


# Batch normalization has buffers that differ between ranks; the others save what rank 0 has.
NORM = """
plain = model
def model():
    return nn.Sequential(nn.BatchNorm1d(4), plain(), nn.Dropout(0.1))
"""
FEW = ("--crash", "1", "--kill-node", "1")
MANY = ("--crash", "8", "--kill-node", "5", "--silent-node", "4", "--hang", "3", "--two", "4",
        "--down", "5", "--set", "dataset.pause=0.03")  # fmt: skip


@pytest.mark.timeout(6000)
@pytest.mark.parametrize(
    ("faults", "most"),
    [pytest.param(FEW, 800), pytest.param(MANY, 4500, marks=pytest.mark.full)],
    ids=["two", "twenty"],
)
def test_what_is_not_announced_costs_no_step(
    user: tuple[Path, dict[str, str]], faults: tuple[str, ...], most: int
) -> None:
    """A spare replaces a lost node, and a rank that is left saves the newest step."""
    task = user[0] / "jobs/toy.py"
    task.write_text(task.read_text() + NORM)
    size = ("--set", f"max_steps={most}", "--gpus", "2", "--spares", "1")
    code, found, talk = rehearse(user, *size, *faults)
    assert code == 0, (found, talk)
    assert all(fault["survived"] for fault in found["faults"]), talk
    assert found["steps_lost"] == 0
    assert found["weights_equal"] and found["order_equal"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        pytest.param(19, "lost node", marks=pytest.mark.smoke("lost node")),
        pytest.param(37, "node failure", marks=pytest.mark.full),  # with it the batch script
    ],
    ids=["the second", "the first"],
)
def test_a_node_dies(user: tuple[Path, dict[str, str]], seed: int, cause: str) -> None:
    """With its daemon, its step daemon and its ranks."""
    code, found, talk = rehearse(
        user, "--set", "max_steps=60", "--set", "dataset.pause=0.05", "--gpus", "2",
        "--kill-node", "1", "--seed", str(seed),
    )  # fmt: skip
    assert code == 0, (found, talk)
    (fault,) = found["faults"]
    assert fault["survived"] and fault["cause"] == cause
    assert found["steps_lost"] == 0  # a rank of the other node has saved the newest one
    assert found["weights_equal"] and found["order_equal"]
