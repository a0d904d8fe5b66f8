import json
import shutil
from pathlib import Path

import pytest
from sites import Site
from submitted import begun, queue, run_of, submitted

from hpcddp.attempt import decision, ledger
from hpcddp.attempt.decision import Policy
from hpcddp.errors import RunError
from hpcddp.observe import history
from hpcddp.rundir import write_json
from hpcddp.slurm import commands as slurm
from hpcddp.submit import status, submission, times


def asked(site: Site) -> int:
    path = site.folder / "asked"
    return len(path.read_text().splitlines()) if path.exists() else 0


def away(site: Site) -> None:
    site.program(
        "squeue", f"echo asked >>{site.folder}/asked; echo 'Unable to contact x' >&2; exit 1"
    )


def test_a_pending_job_tells_why_it_waits_and_since_when(site: Site) -> None:
    run = submitted(run_of(site))
    queue(site, "7|PENDING|Resources|2030-01-01T10:00:00|2030-01-02T00:00:00|||toy-1")
    now = status.status(run)
    assert (now.state, now.reason, now.since) == (
        "PENDING",
        "Resources: the nodes that it needs are busy: wait, or ask for less",
        times.iso(times.seconds("2030-01-01T10:00:00")),
    )
    assert (now.nodes, now.gpus_per_node, now.job_id, now.final) == ("1-2", 4, "7", False)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHeldUser", "held by you; release it with scontrol release 7"),
        ("JobHeldAdmin", "held by an administrator, who can release it with scontrol release 7"),
        ("launch failed requeued held", "it failed to start on a node; release it with scontrol"),
        ("launch_failed_requeued_held", "it failed to start on a node; release it with scontrol"),
        ("job requeued in held state", "held by Slurm; release it with scontrol release 7"),
        ("JobHoldMaxRequeue", "it failed to start too often; release it with scontrol release 7"),
    ],
)
def test_a_job_that_is_held_tells_what_lets_it_go(site: Site, reason: str, words: str) -> None:
    run = submitted(run_of(site))
    queue(site, f"7|PENDING|{reason}|1893456000|N/A|||toy-1")
    now = status.status(run)
    assert now.state == "PENDING" and now.reason.startswith(f"{reason}: ")
    assert words in now.reason
    assert now.since == status.stamp(1893456000)


def test_a_running_job_tells_where_and_how_far(site: Site) -> None:
    run = begun(submitted(run_of(site)))
    records = [
        {"event": "map", "ranks": []},
        {"event": "start", "step": 0, "total_steps": 200},
        {"event": "train", "step": 90, "epoch": 1, "loss": 3.0},
        {"event": "eval", "step": 95, "epoch": 1, "metrics": {"accuracy": 0.5}},
        {"event": "train", "step": 100, "epoch": 2, "loss": 2.0},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    run.attempt(1).metrics.write_text(text + '{"event": "train", "st')
    queue(site, "7|RUNNING|None|2030-01-01T10:00:00|2030-01-01T11:00:00|n[1-2]||toy-1")
    now = status.status(run)
    assert (now.state, now.reason, now.hosts, now.attempt) == ("RUNNING", "", "n[1-2]", 1)
    assert now.since == times.iso(times.seconds("2030-01-01T11:00:00"))
    assert (now.step, now.total_steps, now.epoch, now.loss) == (100, 200, 2, 2.0)
    assert now.metrics == {"accuracy": 0.5}


def test_only_the_end_of_long_metrics_is_read(site: Site) -> None:
    run = begun(submitted(run_of(site)))
    line = json.dumps({"event": "train", "step": 1, "epoch": 1, "loss": 1.0, "pad": "x" * 200})
    lines = [json.dumps({"event": "start", "total_steps": 900}), *[line] * 1000]
    lines.append(json.dumps({"event": "train", "step": 901, "epoch": 3, "loss": 0.5}))
    run.attempt(1).metrics.write_text("\n".join(lines))
    now = status.known(run)
    assert (now.step, now.total_steps, now.loss) == (901, 900, 0.5)


@pytest.mark.parametrize(
    ("cause", "code", "state"),
    [
        (decision.DONE, 0, "COMPLETED"),
        (decision.ASKED, 85, "STOPPED"),
        (decision.CANCELLED, 143, "CANCELLED"),
        (decision.CRASH, 1, "FAILED"),
    ],
)
def test_a_run_that_ended_is_not_asked_about(site: Site, cause: str, code: int, state: str) -> None:
    run = begun(submitted(run_of(site)))
    ledger.end(run, 1, code, cause)
    queue(site, "7|RUNNING|None|x|x|n1||toy-1")
    now = status.status(run)
    assert (now.state, now.final, asked(site)) == (state, True, 0)
    assert bool(now.reason) is (state == "FAILED")


def test_a_failure_tells_the_first_rank_and_its_words(site: Site) -> None:
    run = begun(submitted(run_of(site)))
    error = {"rank": 5, "host": "n2", "type": "ValueError", "message": "too small"}
    write_json(run.attempt(1).error, error)
    ledger.end(run, 1, 1, decision.CRASH)
    assert status.status(run).reason == "rank 5 on n2: ValueError: too small"


def test_a_run_that_ends_while_slurm_is_asked_has_its_own_word(site: Site) -> None:
    run = begun(submitted(run_of(site)))
    write_json(run.attempt(1).error, {"rank": 3, "host": "n2", "type": "E", "message": "boom"})

    def late() -> list[slurm.QueuedJob]:
        ledger.end(run, 1, 1, decision.CRASH)
        return [slurm.QueuedJob("7", "FAILED", "NonZeroExitCode", None, None, "n1", "toy-1")]

    now = status.status(run, late)
    assert (now.state, now.reason) == ("FAILED", "rank 3 on n2: E: boom")


def test_a_run_that_is_removed_under_a_look_has_no_state(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(site)
    monkeypatch.setattr(status, "current", lambda run: shutil.rmtree(run.path))
    with pytest.raises(RunError, match="no run here"):
        status.known(run)


def test_a_slurm_that_is_away_leaves_the_last_known_state(site: Site) -> None:
    run = begun(submitted(run_of(site)))
    away(site)
    now = status.status(run)
    assert (now.state, now.stale, now.final) == ("RUNNING", True, False)
    assert "Unable to contact" in now.reason


@pytest.mark.parametrize(
    ("request_", "state"), [(None, "LOST"), ("stop", "STOPPED"), ("cancel", "CANCELLED")]
)
def test_a_job_that_is_gone_without_a_word(site: Site, request_: str | None, state: str) -> None:
    run = submitted(run_of(site))
    if request_:
        write_json(run.request, {"want": request_, "job_id": "7"})
    queue(site)
    now = status.status(run)
    assert (now.state, now.final) == (state, True)


@pytest.mark.parametrize(("words", "state"), [("", "CANCELLED"), (" DUE TO TIME LIMIT", "TIMEOUT")])
def test_slurm_may_have_left_a_word_where_the_script_could_not(
    site: Site, words: str, state: str
) -> None:
    said = site.write("log", f"*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00{words} ***\n")
    run = begun(submitted(run_of(site)), said=str(said))
    queue(site)
    assert status.status(run).state == state
    (row,) = history.summaries(run, over=True)
    assert row.cause == {"CANCELLED": "cancelled", "TIMEOUT": "time limit"}[state]


def test_states_of_slurm_are_shown_as_they_are(site: Site) -> None:
    run = begun(submitted(run_of(site)))
    queue(site, "7|TIMEOUT|TimeLimit|x|x|n1||toy-1")
    now = status.status(run)
    assert (now.state, now.reason, now.final) == ("TIMEOUT", "TimeLimit", True)


def test_what_was_refused_rendered_or_left_open(site: Site) -> None:
    assert status.status(run_of(site, "rendered")).state == "RENDERED"
    refused = status.status(submitted(run_of(site, "no"), None, refused="no such partition"))
    assert (refused.state, refused.reason, refused.final) == ("REFUSED", "no such partition", True)
    assert asked(site) == 0
    queue(site)
    unknown = status.status(submitted(run_of(site, "open"), None))
    assert unknown.state == "LOST" and "did not answer" in unknown.reason


def test_a_job_whose_id_sbatch_never_told_is_found_by_its_name(site: Site) -> None:
    run = submitted(run_of(site), None)
    queue(site, "8|PENDING|Priority|x|x|||another", f"7|PENDING|Resources|x|x||{run.script}|toy-1")
    now = status.status(run, slurm.queue)
    assert (now.state, now.job_id) == ("PENDING", "7") and now.reason.startswith("Resources: ")
    queue(site, f"7|PENDING|Resources|x|x||{run.script}|toy-1")
    with pytest.raises(RunError, match="the run has not ended: job 7 is PENDING"):
        submission.check_ended(run)


def test_a_script_that_plain_sbatch_took_is_followed_too(site: Site) -> None:
    run = begun(run_of(site), job_id="9")
    queue(site, "9|RUNNING|None|x|2030-01-01T00:00:00|n1||toy-1")
    assert (status.status(run).state, status.status(run).job_id) == ("RUNNING", "9")


def test_all_runs_are_one_question(site: Site) -> None:
    for number in range(4):
        submitted(run_of(site, f"toy-{number}"), str(number))
    ledger.end(begun(submitted(run_of(site, "ended"), "5"), "5"), 1, 0, decision.DONE)
    queue(
        site, *(f"{n}|PENDING|Priority|x|x|||toy-{n}" for n in range(3)), "3|PENDING|x|x|x|||other"
    )
    states = {s.run: s.state for s in status.status_all(site.runs)}
    assert states == {
        "toy-0": "PENDING", "toy-1": "PENDING", "toy-2": "PENDING", "toy-3": "LOST",
        "ended": "COMPLETED",
    }  # fmt: skip
    assert asked(site) == 1


def test_a_slurm_that_is_away_is_asked_once_for_all_runs(site: Site) -> None:
    for number in range(4):
        submitted(run_of(site, f"toy-{number}"), str(number))
    away(site)
    states = status.status_all(site.runs)
    assert [s.state for s in states] == ["PENDING"] * 4 and all(s.stale for s in states)
    assert asked(site) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "run": 5}'])
def test_a_damaged_run_hides_no_other(site: Site, text: str) -> None:
    run_of(site, "good")
    run_of(site, "bad").job.write_text(text)
    states = {s.run: s for s in status.status_all(site.runs)}
    assert {run: s.state for run, s in states.items()} == {"good": "RENDERED", "bad": "DAMAGED"}
    assert states["bad"].reason and states["bad"].path == str(site.runs / "bad")


def test_as_data_it_has_a_version_and_the_log(site: Site) -> None:
    data = status.status(run_of(site)).to_dict()
    assert data["schema_version"] == 1
    assert data["log"] == str(Path(site.runs, "toy-1", "log"))
    json.dumps(data)


def test_a_policy_is_one_line() -> None:
    line = status.in_words(Policy(hangs=5, timeouts=9))
    assert "3 crashes or 5 hangs without progress, or 9 time limits" in line
    assert "3 time limits in a row" in status.in_words(Policy())
    assert "false" in status.in_words(Policy(enabled=False))


def test_a_run_that_waits_to_start_again_has_no_hosts(site: Site) -> None:
    run = submitted(run_of(site))
    begun(run, cause="preempted", action=decision.AGAIN, nodes="n[1-2]")
    assert (status.known(run).state, status.known(run).hosts) == ("PENDING", "")
    queue(site, "7|PENDING|BeginTime|1893456000|N/A|||toy-1")
    assert status.status(run).hosts == ""
    queue(site, "7|RUNNING|None|1893456000|1893456000|n[3-4]||toy-1")
    assert status.status(run).hosts == "n[3-4]"
