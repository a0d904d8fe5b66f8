"""A rank is lost without a warning, and the others save the step that they hold: real ranks over
gloo on two nodes, under parents and their supervisor."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from places import Place, assert_same, newest
from ranks import HALVES, make_run, records, wait_for
from rescued_loop import make_loop

from hpcddp.attempt import exit_codes, ledger
from hpcddp.attempt.link import supervised

SLOW = """
import time
_loss = loss
def loss(output, target):
    time.sleep(0.02)
    return _loss(output, target)
"""
# Numbers that a rank draws, and buffers that differ between ranks after a forward pass.
NOISY = """
def model():
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
    ).double()
"""


# A rank that waits where no signal can end it, as in NCCL.
STUCK = """
import ctypes, os
from hpcddp.train.checkpoint import rescue
rescue.LEAVE, steps = 1.0, 0
_loss = loss
def loss(output, target):
    global steps
    steps += 1
    while steps > 9 and os.environ["RANK"] != "0":
        open(os.environ["HPCDDP_RUN_DIR"] + "/stuck", "w").close()
        ctypes.CDLL(None).sleep(1000)
    return _loss(output, target)
"""


def log_of_a_loss(place: Place, victim: int, count: int) -> str:
    """The log of an attempt of which a rank is killed after so many steps."""
    attempt, run = place.start(), place.run
    wait_for(lambda: place.metrics.exists() and len(records(run, "step")) > count, "steps", 150)
    os.kill(place.pids()[victim], signal.SIGKILL)
    assert attempt.wait(60) == 137
    return run.attempt(place.number).log.read_text()


@pytest.mark.parametrize(
    ("victim", "catches", "more"),
    [
        pytest.param(0, False, "None", marks=pytest.mark.full),
        (3, True, "ema"),
    ],  # a further object is rank 0's
    ids=["0", "3, caught"],
)
def test_a_script_of_ones_own_loses_no_step_either(
    tmp_path: Path, places: list[Place], victim: int, catches: bool, more: str
) -> None:
    run = make_loop(tmp_path / "a", more=more, catches=catches)
    places.append(place := Place(run))
    log = log_of_a_loss(place, victim, 10)  # in the second epoch: the schedule has stepped
    assert "saved by rank" in log, log
    saved = newest(run)
    assert place.start().wait(60) == 0, run.attempt(2).log.read_text()
    assert [x["step"] for x in records(run, "start", attempt=2)] == [saved]
    places.append(other := Place(make_loop(tmp_path / "b", more=more)))
    assert other.start().wait(60) == 0
    assert_same(run, other.run)
    metas = [
        json.loads((r.checkpoints / "step-40/meta.json").read_text()) for r in (run, other.run)
    ]
    assert len({json.dumps([m["own"], m["scheduler"], m["optimizer"]]) for m in metas}) == 1


@pytest.mark.parametrize(
    ("victim", "saved"), [(0, "[]"), pytest.param(3, "['0']", marks=pytest.mark.full)]
)
def test_buffers_that_a_rank_has_changed_for_itself_are_not_saved(
    tmp_path: Path, places: list[Place], victim: int, saved: str
) -> None:
    """As in a second forward pass before the next batch: rank 0's count."""
    run = make_loop(tmp_path / "a", after="layers(x)")
    places.append(place := Place(run))
    log = log_of_a_loss(place, victim, 3)
    assert str(re.findall(r"saved by rank (\d)", log)) == saved, log


@pytest.mark.parametrize(
    ("fault", "victim", "model", "code"),
    [
        (signal.SIGKILL, 0, NOISY, 137),
        pytest.param(signal.SIGKILL, 3, "", 137, marks=pytest.mark.full),
        (signal.SIGSTOP, 1, NOISY, exit_codes.HUNG),
        (signal.SIGKILL, 0, HALVES, 137),
    ],
    ids=["killed", "killed, plain", "hung", "hsdp"],
)
def test_no_step_is_lost_with_a_rank(
    tmp_path: Path, places: list[Place], fault: int, victim: int, model: str, code: int
) -> None:
    facts: dict[str, Any] = {"nodes": (2, 2), "gpus": 2, "max_steps": 40, "global_batch": 8}
    facts |= {"train__hang_seconds": 5.0, "train__eval_every": 0}  # nothing is saved before
    facts["strategy"] = "hsdp" if model == HALVES else "ddp"
    run = make_run(tmp_path / "a", extra=model + SLOW, **facts)
    places.append(place := Place(run))
    attempt = place.start()
    wait_for(lambda: place.metrics.exists() and len(records(run, "train")) > 5, "5 steps", 150)
    os.kill(place.pids()[victim], fault)
    assert attempt.wait(60) == code
    log = run.attempt(1).log.read_text()
    assert "saved by rank" in log, log
    saved = newest(run)
    assert saved >= 5
    assert ledger.newest_save(run) == (1, saved, False)  # a save at the failure is no progress
    second = place.start()
    assert second.wait(60) == 0, run.attempt(2).log.read_text()
    started = [x["step"] for x in records(run, "start", attempt=2)]
    assert started[-1] == saved
    undisturbed = make_run(tmp_path / "b", extra=model, **facts)
    places.append(other := Place(undisturbed))
    assert other.start().wait(60) == 0
    assert_same(run, undisturbed)


def test_ranks_that_cannot_save_leave_all_the_same(tmp_path: Path, places: list[Place]) -> None:
    facts: dict[str, Any] = {"nodes": (2, 2), "gpus": 2, "max_steps": 40, "global_batch": 8}
    run = make_run(tmp_path, extra=HALVES + STUCK, strategy="fsdp", **facts)
    places.append(place := Place(run))
    attempt = place.start()
    wait_for((run.path / "stuck").exists, "a stuck rank", 150)
    os.kill(place.pids()[0], signal.SIGKILL)
    assert attempt.wait(0.7 * supervised.KILL_WAIT) == 137
    assert "not saved" not in run.attempt(1).log.read_text()
