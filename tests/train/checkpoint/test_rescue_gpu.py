"""A rank is lost without a warning, and another saves what its GPU holds: two ranks on one GPU."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from places import Place, assert_same, newest
from ranks import make_run, records, wait_for
from rescued_loop import make_loop

from hpcddp.rundir import RunDir

GPU = any(Path("/proc/driver/nvidia/gpus").glob("*"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no GPU on this machine")]

# Only a test may want that.
SHARED = """
import os
import torch
from hpcddp.train.rank import devices

def apart(reports):
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]

devices.pick, devices.check_shared = lambda *_, **__: torch.device("cuda", 0), apart
if "RANK" in os.environ:  # a script of one's own
    apart([])
"""
NOISY = """
import time
def model():
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
    ).double()
_loss = loss
def loss(output, target):
    time.sleep(0.02)
    return _loss(output, target)
"""
# The GPU takes longer for a step than Python.
AHEAD = """
def loss(output, target):
    torch.cuda._sleep(60_000_000)
    return _loss(output, target)
"""


@pytest.mark.parametrize("work", ["", AHEAD], ids=["in step", "ahead"])
def test_a_killed_rank_costs_no_step(
    tmp_path: Path, places: list[Place], monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """The other waits in NCCL, and saves what its GPU holds."""
    share_a_gpu(tmp_path, monkeypatch)
    facts: dict[str, Any] = {"nodes": (2, 2), "gpus": 1, "max_steps": 200, "train__eval_every": 0}
    run, whole = (make_run(tmp_path / x, extra=NOISY + work, **facts) for x in ("hit", "whole"))
    kill_and_compare(places, run, whole, "train")
    ranks = records(run, "ranks")[0]
    assert ranks["backend"] == "nccl" and {r["device"] for r in ranks["ranks"]} == {"cuda:0"}


@pytest.mark.parametrize("catches", [False, True])
def test_a_script_of_ones_own_loses_no_step_either(
    tmp_path: Path, places: list[Place], monkeypatch: pytest.MonkeyPatch, catches: bool
) -> None:
    share_a_gpu(tmp_path, monkeypatch)
    run = make_loop(tmp_path / "hit", catches=catches, gpu=True)
    whole = make_loop(tmp_path / "whole", gpu=True)
    kill_and_compare(places, run, whole, "step")


def kill_and_compare(places: list[Place], run: RunDir, whole: RunDir, event: str) -> None:
    """Kill a rank after some steps, start again, and compare with a run that was left alone."""
    places.append(place := Place(run))
    attempt = place.start(2, 1)
    wait_for(lambda: place.metrics.exists() and len(records(run, event)) > 12, "12 steps", 150)
    os.kill(place.pids()[0], signal.SIGKILL)
    assert attempt.wait(60) == 137
    log = run.attempt(1).log.read_text()
    assert "saved by rank 1" in log, log
    assert newest(run) >= max(record["step"] for record in records(run, event)), log
    assert place.start(2, 1).wait(120) == 0, run.attempt(2).log.read_text()
    places.append(other := Place(whole))
    assert other.start(2, 1).wait(120) == 0, whole.attempt(1).log.read_text()
    assert_same(run, whole)


def share_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks of two nodes have the first GPU: NCCL believes them on two hosts."""
    (folder / "sitecustomize.py").write_text(SHARED)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
