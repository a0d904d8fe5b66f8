"""Ranks are lost in the moments in which the state changes, is saved or is agreed on, each in an
attempt of its own: nothing is lost, and the run ends as if nothing had happened."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from places import Place, assert_same, newest
from ranks import HALVES, make_run, records, wait_for

from hpcddp import processes
from hpcddp.attempt.link.parents import PARENT
from hpcddp.rundir import RunDir
from hpcddp.sandbox import compare

# Each attempt: the moment, the first step at which it counts, and the rank that is killed then.
MOMENTS = [
    ("before the update", 3, 1),
    ("after the update", 6, 0),
    ("evaluation", 10, 2),
    ("save", 12, 3),
    ("vote", 16, 0),
    ("second", 21, 2),  # and rank 0 in the save that follows
]
STEPS = 30
TASK = """
import json, os, signal, time
from hpcddp.train import stop
from hpcddp.train.checkpoint import save_writer

rank, attempt = int(os.environ["RANK"]), int(os.environ["HPCDDP_ATTEMPT"])
moment, first, victim = {**dict(enumerate(MOMENTS, 1))}.get(attempt, ("", 0, -1))
taken = 0

def die(here, step=None, who=None):
    step = taken if step is None else step
    if here == moment and step >= first and rank == (victim if who is None else who):
        os.kill(os.getpid(), signal.SIGKILL)

class Dying(torch.optim.AdamW):
    def step(self, closure=None):
        global taken
        state = next(iter(self.state.values()), {})
        taken = int(state.get("step", 0)) + 1
        if moment == "failed update" and taken >= first and rank == victim:
            raise RuntimeError("no update")
        die("before the update")
        die("second")
        super().step(closure)
        die("after the update")
        die("bad loss")

def optimizer(model, train):
    return Dying(model.parameters(), lr=0.01)

def model():
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
    ).double()

_loss, _metrics = loss, metrics
def loss(output, target):
    time.sleep(0.02)
    bad = moment == "bad loss" and taken + 1 == first and rank == 0
    return _loss(output, target) + 1e6 * bad

def metrics(output, target):
    die("evaluation")
    return _metrics(output, target)

def write(self, aside, parts, do=save_writer.SaveWriter._write_share):
    die("save", int(aside.name[5:]))
    if self._world.size == 1:
        die("second", who=0)
    return do(self, aside, parts)

def vote(self, tick, step, do=stop.StopVote._vote):
    die("vote", step)
    return do(self, tick, step)

save_writer.SaveWriter._write_share, stop.StopVote._vote = write, vote
"""


def make(
    folder: Path, moments: list[tuple[str, int, int]], every: int = 4, extra: str = "", **more: Any
) -> RunDir:
    facts: dict[str, Any] = {"nodes": (2, 2), "gpus": 2, "max_steps": STEPS, "global_batch": 8}
    facts |= {"train__trace": True, "train__eval_every": 1, "checkpoint__every": every}
    return make_run(folder, extra=TASK.replace("MOMENTS", repr(moments)) + extra, **facts | more)


def evaluations(run: RunDir) -> list[str]:
    return [json.dumps([x["step"], x["metrics"]]) for attempt in run.all_attempts()
            for x in records(run, "eval", attempt.number)]  # fmt: skip


def parents_below(pid: int) -> list[int]:
    """The parents of ranks that a process has started."""
    mine = []
    for child in processes.children(pid):
        named = Path(f"/proc/{child}/comm").read_text().strip() == PARENT
        mine += [child] if named else parents_below(child)
    return mine


def test_in_whatever_moment_ranks_are_lost_no_step_is(tmp_path: Path, places: list[Place]) -> None:
    run = make(tmp_path / "a", MOMENTS)
    places.append(place := Place(run))
    for moment, *_ in MOMENTS:
        assert place.start().wait(120) == 137, moment
        log = run.attempt(place.number).log.read_text()
        assert "saved by rank" in log, (moment, log)
    assert place.start().wait(120) == 0
    assert sum(compare.lost(run).values()) == 0
    places.append(other := Place(make(tmp_path / "b", [])))
    assert other.start().wait(120) == 0
    assert_same(run, other.run)
    assert compare.difference(other.run, run, 4) == ""
    assert evaluations(run) == evaluations(other.run)


def test_a_rank_that_fails_inside_its_update_saves_nothing(
    tmp_path: Path, places: list[Place]
) -> None:
    run = make(tmp_path, [("failed update", 9, 0)], every=100, train__eval_every=0)
    places.append(place := Place(run))
    assert place.start().wait(120) == 1
    log = run.attempt(1).log.read_text()
    assert "saved by rank" in log and "saved by rank 0" not in log, log
    assert place.start().wait(120) == 0
    assert compare.lost(run) == {1: 0}


def test_a_rank_whose_loss_is_bad_saves_nothing(tmp_path: Path, places: list[Place]) -> None:
    run = make(tmp_path, [("bad loss", 9, 3)], every=100, train__eval_every=0)
    places.append(place := Place(run))
    assert place.start().wait(120) == 137
    log = run.attempt(1).log.read_text()
    assert "saved by rank" in log and "saved by rank 0" not in log, log
    assert newest(run) == 9


def test_what_the_training_passed_over_does_not_push_out_a_save_at_a_failure(
    tmp_path: Path, places: list[Place]
) -> None:
    """Its content is damaged, and its size is as it was."""
    moments = [("before the update", 11, 0), ("before the update", 7, 0)]
    run = make(tmp_path, moments, train__eval_every=0, checkpoint__keep=9)
    places.append(place := Place(run))
    assert place.start().wait(120) == 137
    damaged = {*run.checkpoints.glob("step-*")} - {run.checkpoints / "step-4"}
    assert run.checkpoints / "step-11" in damaged
    for path in damaged:
        data = next(path.glob("*.distcp"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    job = json.loads(run.job.read_text())
    job["spec"]["checkpoint"]["keep"] = 1
    run.job.write_text(json.dumps(job))
    assert place.start().wait(120) == 137
    assert {*run.checkpoints.glob("step-*")} == damaged | {run.checkpoints / "step-7"}
    assert place.start().wait(120) == 0
    assert records(run, "start", attempt=3)[0]["step"] == 7


@pytest.mark.parametrize(
    ("nodes", "gpus", "strategy"),
    [(2, 2, "ddp"), pytest.param(4, 1, "ddp=2,fsdp=2", marks=pytest.mark.full)],
)
def test_without_a_supervisor_the_parents_have_the_newest_step_saved(
    tmp_path: Path, places: list[Place], nodes: int, gpus: int, strategy: str
) -> None:
    """The node of the batch script is lost, and with it the log of the ranks. Where the two ranks
    of a replica are on two nodes, they save together."""
    size: dict[str, Any] = {"nodes": (nodes, nodes), "gpus": gpus, "strategy": strategy}
    run = make(tmp_path, [], every=100, extra=HALVES * (nodes > 2), **size)
    places.append(place := Place(run))
    place.outlives = True
    attempt = place.start(nodes, gpus)
    wait_for(lambda: place.metrics.exists() and len(records(run, "train")) > 3, "3 steps", 150)
    (supervisor,) = processes.children(attempt.pid)
    os.kill(supervisor, signal.SIGKILL)
    ranks = place.pids()
    assert attempt.wait(60) == 1
    wait_for(lambda: not any(map(processes.start_of, ranks)), "the end of the ranks")
    assert newest(run) > 3
    assert place.start(nodes, gpus).wait(120) == 0
    assert compare.lost(run) == {1: 0}


def test_a_rank_that_is_lost_before_the_ranks_have_met_ends_the_attempt_at_once(
    tmp_path: Path, places: list[Place]
) -> None:
    run = make(tmp_path, [])
    places.append(place := Place(run))
    attempt = place.start()

    def ranks() -> list[int]:
        return [
            rank for parent in parents_below(attempt.pid) for rank in processes.children(parent)
        ]

    wait_for(lambda: len(ranks()) > 1, "ranks")
    os.kill(ranks()[-1], signal.SIGKILL)
    assert attempt.wait(60) == 137
    assert place.start().wait(120) == 0


# A rank of the first stage is lost while the last stage already has its gradients.
STAGES = """
class First(nn.Linear):
    calls = 0
    def forward(self, x):
        out = super().forward(x)
        First.calls += self.training
        if First.calls == 7 and rank == 0 and attempt == 1:
            out.register_hook(lambda gradient: (time.sleep(0.5), die("first stage", 9, 0)))
        return out

def model():
    return nn.Sequential(
        First(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    ).double()
"""


@pytest.mark.full
def test_the_stages_of_a_pipeline_hold_the_same_step(tmp_path: Path, places: list[Place]) -> None:
    run = make(tmp_path, [("first stage", 9, 0)], every=100, strategy="pp=2,ddp", extra=STAGES)
    places.append(place := Place(run))
    assert place.start().wait(120) == 137
    log = run.attempt(1).log.read_text()
    assert "saved by ranks 1, 3" in log, log
    assert place.start().wait(120) == 0
    assert compare.lost(run) == {1: 0}
