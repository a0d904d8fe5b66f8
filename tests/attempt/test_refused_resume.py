"""A resume that its first attempt refuses changes nothing: the run's state, and what was asked."""

import json
import socket

import pytest
from sites import Site, record_run

from hpcddp import record
from hpcddp.attempt import decision, exit_codes, ledger, refused_resume
from hpcddp.attempt.host import end
from hpcddp.attempt.ledger import Attempt
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir, write_json
from hpcddp.submit import prepare, status

AGAIN, NONE = decision.AGAIN, decision.NONE
WORDS = "its resume was refused: rank 0 on n1: CheckpointForeign: it is of another model"


@pytest.fixture
def run(site: Site) -> RunDir:
    made = RunDir(site.runs / "toy-1")
    made.create()
    made.script.write_text("of model 8\n")
    return record_run(made, backend="local", spec={"model": {"width": 8}})


def life(run: RunDir, cause: str, action: str = NONE, *, gets_on: bool = False) -> None:
    """An attempt from its begin to its end."""
    facts = Attempt(0, "7", socket.gethostname(), 1, "1", False, "n1", 20.0)
    assert ledger.begin(run, facts, lambda earlier: False)
    if gets_on:
        mark = run.checkpoints / f"step-{10 * facts.number}" / "COMPLETE"
        mark.parent.mkdir(parents=True)
        mark.write_text(json.dumps({"attempt": facts.number}))
        metrics = run.attempt(facts.number).metrics
        line = {"event": "train", "step": 10 * facts.number, "loss": 0.5}
        metrics.write_text(json.dumps(line) + "\n")
    ledger.end(run, facts.number, 1, cause, action)


def ask(run: RunDir, width: int) -> None:
    """What a resume writes."""
    refused_resume.keep(run)
    record_run(run, backend="local", spec={"model": {"width": width}})
    run.script.write_text(f"of model {width}\n")


def refuse(run: RunDir) -> None:
    """An attempt that finds the checkpoint of another model, as its script ends it."""
    facts = ledger.new_attempt("8", 1)
    assert ledger.begin(run, facts, lambda earlier: False)
    error = {"rank": 0, "host": "n1", "type": "CheckpointForeign", "kind": "foreign"}
    error |= {"message": "it is of another model", "traceback": ""}
    write_json(run.attempt(facts.number).error, error)
    assert end(run, facts.number, exit_codes.FAILED) == "1"


def asked(run: RunDir) -> tuple[int, str, int]:
    mode = run.script.stat().st_mode & 0o777
    return record.read(run).spec["model"]["width"], run.script.read_text().split()[-1], mode


@pytest.mark.parametrize(
    ("cause", "state"),
    [
        (decision.DONE, "COMPLETED"),
        (decision.ASKED, "STOPPED"),
        (decision.TIMEOUT, "TIMEOUT"),
        (decision.CRASH, "FAILED"),
    ],
)
def test_the_run_keeps_its_state_and_its_request(run: RunDir, cause: str, state: str) -> None:
    life(run, decision.PREEMPTED, AGAIN, gets_on=True)
    life(run, cause, gets_on=True)
    before = status.known(run)
    assert (before.state, before.refused, before.step) == (state, False, 20)
    ask(run, 16)
    refuse(run)
    found = status.known(run)
    assert (found.state, found.final, found.refused) == (state, True, True)
    assert found.reason == "; ".join(filter(None, (before.reason, WORDS)))
    assert (found.step, found.loss, found.since) == (20, 0.5, before.since)
    assert asked(run) == (8, "8", 0o755)
    assert [a.cause for a in ledger.attempts(run)][1:] == [cause, decision.REFUSED]


def test_it_may_be_refused_more_than_once(run: RunDir) -> None:
    life(run, decision.DONE, gets_on=True)
    for width in (16, 32):
        ask(run, width)
        assert asked(run)[0] == width
        refuse(run)
        assert (status.known(run).state, asked(run)) == ("COMPLETED", (8, "8", 0o755))
    ask(run, 8)
    life(run, decision.DONE)
    assert (status.known(run).state, status.known(run).refused) == ("COMPLETED", False)


def test_a_preemption_before_the_ranks_could_read_changes_nothing_either(run: RunDir) -> None:
    life(run, decision.DONE, gets_on=True)
    ask(run, 16)
    life(run, decision.PREEMPTED, AGAIN)
    refuse(run)
    assert (status.known(run).state, asked(run)[0]) == ("COMPLETED", 8)


def test_who_waited_to_come_back_when_it_was_resumed_was_cancelled(run: RunDir) -> None:
    life(run, decision.PREEMPTED, AGAIN, gets_on=True)
    ask(run, 16)
    refuse(run)
    assert (status.known(run).state, asked(run)[0]) == ("CANCELLED", 8)


def test_code_that_changes_under_a_run_that_comes_back_fails_it(run: RunDir) -> None:
    """No resume has asked for that."""
    life(run, decision.DONE, gets_on=True)
    ask(run, 16)
    life(run, decision.PREEMPTED, AGAIN, gets_on=True)  # that request was a good one
    refuse(run)
    found = status.known(run)
    assert (found.state, found.refused, asked(run)[0]) == ("FAILED", False, 16)
    assert "it is of another model; the checkpoint is of another model or format" in found.reason


def test_what_a_refused_resume_asked_is_not_asked_again(site: Site) -> None:
    """By a real resume: the next one plans what was asked before."""
    site.slurm()
    run = prepare.new_run(site.plan(), site.runs)
    life(run, decision.DONE, gets_on=True)
    script = run.script.read_bytes()
    other = Layer()
    other.put("model.width", 16, "--set")
    other.put("nodes", "2", "--nodes")
    assert prepare.again(run, other, {}).spec.model == {"width": 16}
    assert record.read(run).nodes == [2, 2] and run.script.read_bytes() != script
    refuse(run)
    assert run.script.read_bytes() == script
    made = prepare.again(run, Layer(), {})
    assert (made.spec.model, made.nodes.max) == ({}, 1)
