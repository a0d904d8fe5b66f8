"""The decision after an attempt: every cause, every budget, and what is never revived."""

from itertools import product

import pytest

from hpcddp.attempt.decision import (
    AGAIN,
    ASKED,
    BAD_NODE,
    CANCELLED,
    CRASH,
    DIVERGED,
    DONE,
    ENVIRONMENT,
    FOLLOW,
    HANG,
    HERE,
    KILLED,
    LEFT,
    LOCAL,
    MISTAKE,
    NODE,
    NONE,
    OOM,
    PREEMPTED,
    REFUSED,
    REQUEUED,
    SIGNALLED,
    TIMEOUT,
    End,
    Past,
    Policy,
    decide,
)

ENDED = "COMPLETING"
CASES = [
    ("done", End(0), DONE, NONE),
    ("done while Slurm ends the job", End(0, ENDED, ending=CANCELLED), DONE, NONE),
    ("preempted, all saved", End(85, preempted=True), PREEMPTED, AGAIN),
    ("preempted, seen as SIGNALING", End(85, "SIGNALING", preempted=True), PREEMPTED, AGAIN),
    ("preempted before the handlers", End(143, preempted=True), PREEMPTED, AGAIN),
    ("preempted, a rank was killed", End(137, preempted=True), PREEMPTED, AGAIN),
    ("a crash during the grace time", End(1, preempted=True, kind="crash"), CRASH, AGAIN),
    ("the end of the grace time", End(137, ENDED, requeued=True, preempted=True), PREEMPTED, LEFT),
    ("the time limit ahead", End(85, late=True), TIMEOUT, AGAIN),
    ("warned before the handlers", End(140, late=True), TIMEOUT, AGAIN),
    ("the time limit", End(85, ENDED, ending=TIMEOUT), TIMEOUT, FOLLOW),
    ("PreemptMode=CANCEL", End(85, ENDED, preempted=True, ending=PREEMPTED), PREEMPTED, FOLLOW),
    ("the same, Slurm's words unread", End(85, ENDED, preempted=True), PREEMPTED, FOLLOW),
    ("cancelled in the grace time", End(85, ENDED, preempted=True, grace=True), CANCELLED, NONE),
    ("cancelled in it, in Slurm's words", End(85, ENDED, preempted=True, ending=CANCELLED),
     CANCELLED, NONE),
    ("scancel", End(143, ENDED, ending=CANCELLED), CANCELLED, NONE),
    ("scancel, all saved", End(85, ENDED), CANCELLED, NONE),
    ("scancel -s TERM", End(85), SIGNALLED, AGAIN),
    ("scancel -s TERM in the start", End(143), SIGNALLED, AGAIN),
    ("a node died", End(137, ENDED, requeued=True, ending=NODE), NODE, LEFT),
    ("a node died, not to be requeued", End(137, ENDED, ending=NODE), NODE, FOLLOW),
    ("scontrol requeue", End(85, ENDED, requeued=True, ending=REQUEUED), REQUEUED, LEFT),
    ("hpcddp stop", End(85, want="stop"), ASKED, NONE),
    ("hpcddp stop in the start", End(140, want="stop"), ASKED, NONE),
    ("hpcddp stop, and a crash", End(1, want="stop", kind="crash"), CRASH, NONE),
    ("hpcddp cancel", End(143, want="cancel"), CANCELLED, NONE),
    ("hpcddp preempt", End(85, want="preempt"), PREEMPTED, AGAIN),
    ("an exception", End(1, kind="crash"), CRASH, AGAIN),
    ("a killed rank", End(137), CRASH, AGAIN),
    ("out of memory", End(137, kind="oom"), OOM, AGAIN),
    ("a mistake of the user", End(1, kind="mistake"), MISTAKE, NONE),
    ("a step of the environment", End(1, kind="environment"), ENVIRONMENT, NONE),
    ("a checkpoint of another model", End(1, kind="foreign"), REFUSED, NONE),
    ("a node that failed its checks", End(143, kind="node"), BAD_NODE, AGAIN),
    ("no checkpoint that is whole", End(1, kind="damaged"), MISTAKE, NONE),
    ("a hang", End(86, kind="hang"), HANG, AGAIN),
    ("numbers gone wrong", End(87, kind="diverged"), DIVERGED, NONE),
    ("fenced, by nobody", End(88), CRASH, AGAIN),
    ("preempted in the start, a neighbour says", End(143, preempted=True, kind="peer"), PREEMPTED,
     AGAIN),
    ("a start-up preemption", End(1, preempted=True, kind="peer"), PREEMPTED, AGAIN),
    ("the script was killed", End(137, ENDED, killed=True), KILLED, FOLLOW),
    ("the script was killed, and a person asked", End(137, ENDED, killed=True, want="cancel"),
     CANCELLED, NONE),
    ("scancel -s KILL", End(137, ENDED, ending=CANCELLED, killed=True), CANCELLED, NONE),
    ("the controller is away", End(85, ""), SIGNALLED, AGAIN),
    ("preempted here", End(85, LOCAL, want="preempt"), PREEMPTED, AGAIN),
    ("TERM here", End(85, LOCAL), ASKED, NONE),
    ("TERM here in the start", End(143, LOCAL), CANCELLED, NONE),
    ("a killed rank here", End(137, LOCAL), CRASH, AGAIN),
]  # fmt: skip


@pytest.mark.parametrize(
    ("end", "cause", "action"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_cause_and_action(end: End, cause: str, action: str) -> None:
    found = decide(end, [], Policy())
    assert (found.cause, found.action) == (cause, action)


def every_end() -> list[End]:
    flags = [False, True]
    kinds = ("", "crash", "hang", "oom", "mistake", "diverged")
    codes = (0, 1, 85, 86, 87, 88, 137, 140, 143)
    wants = ("", "stop", "preempt", "cancel")
    return [
        End(code, "RUNNING", requeued, preempted, "", grace, want, kind, late)
        for code, want, kind, requeued, preempted, grace, late in product(
            codes, wants, kinds, flags, flags, flags, flags
        )
    ]  # fmt: skip


def test_failed_ranks_restart_in_place_where_the_allocation_stays() -> None:
    for end in (End(1, kind="crash"), End(137), End(137, kind="oom"), End(86, kind="hang")):
        stays = end._replace(here=True)
        assert decide(stays, [], Policy()).action == HERE
        assert decide(end, [], Policy()).action == AGAIN
        for facts in ({"preempted": True}, {"late": True}, {"warned": True}, {"want": "preempt"}):
            assert decide(stays._replace(**facts), [], Policy()).action == AGAIN
    assert decide(End(143, kind="node", here=True), [], Policy()).action == HERE  # on a spare
    for end in (End(85), End(85, want="preempt")):
        assert decide(end._replace(here=True), [], Policy()).action == AGAIN


def test_nothing_restarts_in_place_while_slurm_or_a_person_ends_the_job() -> None:
    for end in every_end():
        there = end._replace(here=True)
        assert decide(there._replace(state=ENDED), [], Policy()).action != HERE
        if end.want or end.preempted or end.late or end.requeued:
            assert decide(there, [], Policy()).action != HERE


def test_restarts_in_place_have_the_budget_of_their_cause() -> None:
    here = BAD._replace(here=True)
    assert outcomes(here, here, here) == [HERE, HERE, NONE]


def test_what_a_person_cancelled_never_comes_back() -> None:
    """By Slurm's words, by our own request, or by a job that just ends without a reason."""
    for end in every_end():
        told = end._replace(state=ENDED, ending=CANCELLED, requeued=False)
        assert decide(told, [], Policy()).action == NONE
        asked = end._replace(want="cancel", requeued=False)
        assert decide(asked, [], Policy()).action == NONE
        silent = end._replace(state=ENDED, preempted=False, requeued=False)
        assert decide(silent, [], Policy()).action == NONE


def test_a_job_is_queued_again_only_while_it_runs() -> None:
    for end in every_end():
        for state in ("COMPLETING", "CANCELLED", "PENDING", "TIMEOUT", "SUSPENDED"):
            assert decide(end._replace(state=state), [], Policy()).action != AGAIN


def test_numbers_gone_wrong_never_come_back() -> None:
    for end in every_end():
        if end.code == 87:
            assert decide(end._replace(requeued=False), [], Policy()).action == NONE


def outcomes(*ends: End, policy: Policy | None = None) -> list[str]:
    """The actions after a row of attempts, until one is the last."""
    history: list[Past] = []
    actions = []
    for end in ends:
        found = decide(end, history, policy or Policy())
        history.append(Past(found.cause, end.progress))
        actions.append(found.action)
    return actions


BAD = End(1, kind="crash")
MOVED = End(1, kind="crash", progress=True)
PREEMPT = End(85, preempted=True)


def test_three_crashes_without_progress_are_the_end() -> None:
    assert outcomes(BAD, BAD, BAD) == [AGAIN, AGAIN, NONE]
    found = decide(BAD, [Past(CRASH, False)] * 2, Policy())
    assert found.reason == "3 times without progress; requeue.crashes allows no more"


def test_progress_refills_the_budget() -> None:
    assert outcomes(BAD, BAD, MOVED, BAD, BAD, BAD) == [AGAIN] * 5 + [NONE]


def test_other_restarts_do_not_eat_it() -> None:
    assert outcomes(BAD, PREEMPT, BAD, PREEMPT, PREEMPT, BAD) == [AGAIN] * 5 + [NONE]
    assert outcomes(*[PREEMPT] * 50, BAD) == [AGAIN] * 51
    hang = End(86, kind="hang")
    assert outcomes(BAD, BAD, hang, hang, BAD) == [AGAIN] * 4 + [NONE]


def test_memory_and_crashes_share_one() -> None:
    assert outcomes(BAD, End(137, kind="oom"), BAD) == [AGAIN, AGAIN, NONE]


def test_preemptions_and_node_failures_have_no_limit() -> None:
    node = End(137, ENDED, requeued=True, ending=NODE)
    assert outcomes(*[PREEMPT, node] * 50) == [AGAIN, LEFT] * 50


def test_nodes_that_fail_their_checks_are_avoided_three_times() -> None:
    bad = End(143, kind="node")
    assert outcomes(bad, bad, bad, bad) == [AGAIN, AGAIN, AGAIN, NONE]
    assert outcomes(bad, bad, bad, bad._replace(progress=True), bad) == [AGAIN] * 5
    assert outcomes(bad, bad, bad, policy=Policy(crashes=1)) == [AGAIN] * 3


def test_time_limits_as_configured() -> None:
    late = End(85, late=True, progress=True)
    assert outcomes(*[late] * 20) == [AGAIN] * 20
    assert outcomes(*[late] * 3, policy=Policy(timeouts=3)) == [AGAIN, AGAIN, NONE]


def test_time_limits_without_progress_are_the_end() -> None:
    late = End(85, late=True)
    assert outcomes(late, late, late) == [AGAIN, AGAIN, NONE]
    assert "without progress" in decide(late, [Past(TIMEOUT, False)] * 2, Policy()).reason


def test_lost_nodes_without_progress_are_the_end() -> None:
    """Else a job whose ranks end their parents would be requeued for ever."""
    lost = End(137, kind="lost")
    assert outcomes(*[lost] * 10) == [AGAIN] * 9 + [NONE]
    assert outcomes(*[lost] * 9, End(137, kind="lost", progress=True), lost)[-1] == AGAIN


def test_a_job_that_is_not_to_come_back_does_not() -> None:
    for end in (PREEMPT, BAD, End(85, late=True), End(85, ENDED, ending=TIMEOUT)):
        found = decide(end, [], Policy(enabled=False))
        assert (found.action, found.reason) == (NONE, "requeue.enabled is false")


def test_time_limits_that_were_allowed_need_no_progress() -> None:
    """A program's progress is not seen."""
    late = End(85, late=True)
    assert outcomes(*[late] * 3)[-1] == NONE
    assert outcomes(*[late] * 5, policy=Policy(timeouts=5)) == [AGAIN] * 4 + [NONE]


def test_the_policy_is_the_jobs_table() -> None:
    assert Policy.of({"crashes": 5, "exclude_bad_nodes": True}) == Policy(crashes=5)


def test_an_environment_that_has_worked_may_work_again_on_another_node() -> None:
    """One that never has fails in the same way everywhere."""
    end = End(1, kind="environment")
    worked, failed = Past(PREEMPTED, progress=True), Past(ENVIRONMENT, progress=False)
    assert decide(end, [failed], Policy()).action == NONE
    assert decide(end, [worked], Policy()).action == AGAIN
    assert decide(end, [worked, failed, failed], Policy(crashes=3)).action == NONE
