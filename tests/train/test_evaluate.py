"""A stop in the middle of an evaluation: it is broken off, and made up for."""

import json

import pytest
from ranks import TASK, Ranks, make_run, one_rank, records

from hpcddp import record, spec
from hpcddp.preempt import Preemption
from hpcddp.topology import Rank
from hpcddp.train.checkpoint import checkpoint, dcp_files
from hpcddp.train.checkpoint.rescue import Rescue
from hpcddp.train.evaluate import Evaluator
from hpcddp.train.job import train
from hpcddp.train.monitor.heartbeat import Heartbeat
from hpcddp.train.rank import task_module as tasks
from hpcddp.train.rank.world import leave
from hpcddp.train.stop import StopVote

BREAKS = """
import os, signal, time
batches = 0
good = metrics
def metrics(output, target):
    global batches
    batches += 1
    torch.rand(1)
    time.sleep(0.1)  # quicker batches are not worth a vote each
    if os.environ.get("BREAK") and os.environ["HPCDDP_ATTEMPT"] == "1" and batches == 3:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR2)
    return good(output, target)
"""
KEYS = {"data__eval_batch": 2, "epochs": 2, "max_steps": 0, "model__dropout": 0.3,
        "dataset": {"size": 16, "held_out": 41}}  # fmt: skip


@pytest.fixture
def whole(tmp_path):
    run = make_run(tmp_path / "whole", TASK, gpus=2, extra=BREAKS, **KEYS)
    with Ranks.of(run, 2) as ranks:
        assert [code for code, _, err in ranks.wait()] == [0, 0]
    return run


def test_a_stop_breaks_an_evaluation_off_and_the_next_attempt_makes_up_for_it(
    tmp_path, whole, monkeypatch
):
    monkeypatch.setenv("BREAK", "1")
    run = make_run(tmp_path / "broken", TASK, gpus=2, extra=BREAKS, **KEYS)
    with Ranks.of(run, 2) as ranks:
        ends = ranks.wait()
    assert [code for code, *_ in ends] == [85, 85], ends
    assert records(run, "eval") == []
    (end,) = records(run, "end")
    assert (end["step"], end["saved"]) == (4, 4)
    with Ranks.of(run, 2, attempt=2) as ranks:
        assert [code for code, *_ in ranks.wait()] == [0, 0]

    def told(run, attempt):
        return [(r["step"], r["metrics"], r["count"]) for r in records(run, "eval", attempt)]

    assert told(run, 2) == told(whole, 1)
    assert [step for step, *_ in told(run, 2)] == [4, 8]


NORM = """
def model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
"""


def test_what_is_evaluated_is_what_is_saved(tmp_path):
    """Each rank's BatchNorm has seen other samples."""
    run = make_run(tmp_path, gpus=2, extra=NORM, global_batch=8, max_steps=5)
    with Ranks.of(run, 2) as ranks:
        assert [(code, err) for code, _, err in ranks.wait()] == [(0, ""), (0, "")]
    job = record.read(run)
    task = tasks.load(spec.from_dict(job.spec, ""), job.workdir)
    saved = dcp_files.read_all(checkpoint.complete(run.checkpoints)[0], "model.")
    model = task.model()
    model.load_state_dict({name.removeprefix("model."): t for name, t in saved.items()})
    inputs, targets = task.dataset("eval").tensors
    loss = task.loss(model.eval()(inputs), targets).item()
    assert records(run, "eval")[-1]["metrics"]["loss"] == pytest.approx(loss, rel=1e-9)


def test_the_watchdog_is_patient_until_a_new_evaluations_first_batch_is_through(
    tmp_path, monkeypatch
):
    """The first vote waits for the slowest rank's dataset, and the first batch for its workers."""
    heartbeat, seen = Heartbeat(), []
    values, agreed = Evaluator._values, StopVote.agreed

    def looked(self, output, targets):
        seen.append(("batch", heartbeat.patient))
        return values(self, output, targets)

    def voted(self, tick, *, step=None, now=False):
        if step is not None:  # in an evaluation
            seen.append(("vote", heartbeat.patient))
        return agreed(self, tick, step=step, now=now)

    monkeypatch.setattr(Evaluator, "_values", looked)
    monkeypatch.setattr(StopVote, "agreed", voted)
    run = make_run(tmp_path, epochs=2, max_steps=0, data__eval_batch=4)
    train(run, Rank(0, 1, 0, 1, 0), 1, Preemption(), heartbeat=heartbeat)
    leave()
    assert seen == [("vote", 1), ("batch", 1), *[("vote", 0), ("batch", 0)] * 3]


def test_a_step_that_is_to_be_evaluated_is_marked_so_and_again_with_the_result(
    tmp_path, monkeypatch
):
    """A GPU has the meta of a step from its mark on, and saves it if a rank is lost meanwhile."""
    begin, mark, marks = Rescue.begin, Rescue.mark, []

    def begun(self, at, describe, **how):
        self.describe = describe
        begin(self, at, describe, **how)

    def marked(self, at):
        mark(self, at)
        meta = json.loads(self.describe())
        marks.append((meta["step"], meta["owed"], meta["best"].get("step")))

    monkeypatch.setattr(Rescue, "begin", begun)
    monkeypatch.setattr(Rescue, "mark", marked)
    run = make_run(tmp_path, epochs=2, max_steps=0, dataset={"size": 12})
    one_rank(run)
    assert marks[:4] == [(1, False, None), (2, False, None), (3, True, None), (3, False, 3)]
    assert marks[4:7] == [(4, False, 3), (5, False, 3), (6, True, 3)]
    assert marks[7][:2] == (6, False)
