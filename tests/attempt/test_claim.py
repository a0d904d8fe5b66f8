"""How an attempt begins: which job may work in a run dir, and which leaves."""

import os
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
from lives import earlier
from sites import Site, record_run

from hpcddp import processes
from hpcddp.attempt import claim, host, ledger, sentry
from hpcddp.attempt.nodes import node_events
from hpcddp.errors import RunError
from hpcddp.rundir import RunDir, write_json


def test_a_local_life_begins(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["begin", str(run.path), str(os.getpid())]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(rf"1 127\.0\.0\.1 \d+ 0 {re.escape(str(run.path))}\n", out)
    found = ledger.last(run)
    assert found and found.job_id == str(os.getpid()) and not found.slurm
    assert found.pid_start == processes.start_of(os.getpid()) != ""


@pytest.mark.usefixtures("in_slurm")
def test_the_first_host_of_the_allocation_is_the_rendezvous(run: RunDir) -> None:
    assert host.begin(run, 1).split()[:2] == ["1", "gpu07-ib0"]
    found = ledger.last(run)
    assert found and (found.job_id, found.nodes, found.slurm) == ("7", "gpu[07-08]", True)


def test_a_script_for_slurm_that_no_job_runs_is_refused(run: RunDir) -> None:
    record_run(run)
    with pytest.raises(RunError, match="must run in a Slurm job") as caught:
        host.begin(run, os.getpid())
    assert caught.value.hint == f"submit it: sbatch {run.script}"
    assert ledger.attempts(run) == []


def test_a_local_script_in_somebodys_job_is_local(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]")
    assert host.begin(run, os.getpid()).startswith("1 127.0.0.1 ")
    found = ledger.last(run)
    assert found and (found.job_id, found.slurm) == (str(os.getpid()), False)


@pytest.mark.parametrize("what", ["folder", "job", "pickles", "pickle"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_to_is_refused(
    run: RunDir, capsys: pytest.CaptureFixture[str], what: str, mode: int
) -> None:
    run.submitit.mkdir(mode=0o700)
    pickle = run.submitit / "7_submitted.pkl"
    pickle.touch(0o600)
    paths = {"folder": run.path, "job": run.job, "pickles": run.submitit, "pickle": pickle}
    claim.check_owner(run)
    paths[what].chmod(paths[what].stat().st_mode | mode)
    assert host.main(["begin", str(run.path), "1"]) == host.FAILED
    out, err = capsys.readouterr()
    assert out == "" and "chmod go-w" in err and str(paths[what]) in err
    assert ledger.attempts(run) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_somebody_else_is_refused(run: RunDir) -> None:
    os.chown(run.job, 12345, -1)
    with pytest.raises(RunError, match="writable by another user"):
        host.begin(run, 1)


def test_a_run_that_was_deleted_is_no_traceback(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.runs.mkdir()
    assert host.main(["begin", str(site.runs / "gone"), "1"]) == host.AWAY  # with all of the runs
    (site.runs / "another").mkdir()
    assert host.main(["begin", str(site.runs / "gone"), "1"]) == host.FAILED
    assert "there is no run here" in capsys.readouterr().err
    assert not (site.runs / "gone").exists()


def test_a_second_life_leaves_while_the_first_one_works(run: RunDir) -> None:
    earlier(run, job_id="6")
    with pytest.raises(RunError, match="job 6 is already running this run") as caught:
        host.begin(run, 1)
    assert "hpcddp cancel toy-1" in caught.value.hint
    assert len(ledger.attempts(run)) == 1


@pytest.mark.parametrize(
    "start", ["1", processes.start_of(os.getpid()) + "1"], ids=["gone", "another"]
)
def test_a_life_whose_process_is_gone_is_taken_over(run: RunDir, start: str) -> None:
    """Also when its process id was given to another process since."""
    earlier(run, pid_start=start)
    assert host.begin(run, 1).startswith("2 ")


def test_of_another_machine_nothing_can_be_said(run: RunDir) -> None:
    earlier(run, host="elsewhere", pid_start="1")
    with pytest.raises(RunError, match="already running"):
        host.begin(run, 1)


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("answer", "begins"),
    [
        ("echo '6|RUNNING|None|x|x|n1||toy-1'", False),
        ("echo '6|PENDING|Resources|x|x|n1||toy-1'", False),
        ("echo '6|COMPLETED|None|x|x|n1||toy-1'", True),
        ("exit 0", True),
    ],
)
def test_slurm_knows_whether_an_earlier_job_works(
    site: Site, run: RunDir, answer: str, begins: bool
) -> None:
    earlier(run, slurm=True, job_id="6")
    site.program("squeue", answer)
    if begins:
        assert host.begin(run, 1).startswith("2 ")
    else:
        with pytest.raises(RunError, match="job 6 is already running"):
            host.begin(run, 1)


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize("words", ["Unable to contact slurm controller", "Access denied"])
def test_a_controller_that_is_away_refuses_nobody(
    site: Site, run: RunDir, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    earlier(run, slurm=True, job_id="6")
    answered = site.folder / "answered"
    site.program(
        "squeue", f"[ -e {answered} ] || {{ touch {answered}; echo '{words}' >&2; exit 1; }}"
    )
    monkeypatch.setattr(claim, "PAUSE", 0.01)
    assert host.begin(run, 1).startswith("2 ")
    monkeypatch.setattr(claim, "PATIENCE", 0.0)
    earlier(run, slurm=True, job_id="6")
    site.program("squeue", f"echo '{words}' >&2; exit 1")
    assert host.main(["begin", str(run.path), "1"]) == host.AWAY


@pytest.mark.usefixtures("in_slurm")
def test_a_requeued_job_is_its_own_earlier_life(run: RunDir) -> None:
    earlier(run, slurm=True, job_id="7")
    assert host.begin(run, 1).startswith("2 ")


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(("asked_of", "begins"), [("7", False), ("6", True)])
def test_a_request_counts_for_the_job_that_it_names(
    run: RunDir, capsys: pytest.CaptureFixture[str], asked_of: str, begins: bool
) -> None:
    write_json(run.request, {"want": "stop", "job_id": asked_of})
    assert host.main(["begin", str(run.path), "1"]) == 0
    out, err = capsys.readouterr()
    assert bool(out.strip()) is begins
    assert ("stop was requested" in err) is not begins
    assert run.request.exists() is not begins
    assert len(ledger.attempts(run)) == int(begins)


def test_a_begin_that_the_script_has_given_up_claims_nothing(run: RunDir) -> None:
    """A disk that blocks holds it; the script has gone on without it when the disk is back."""
    words = ["begin", str(run.path), str(os.getpid())]
    begin = subprocess.Popen(
        [sys.executable, "-m", "hpcddp.attempt.host", *words], stdout=subprocess.PIPE
    )
    assert begin.stdout
    begin.stdout.close()
    assert begin.wait() == host.FAILED
    assert ledger.attempts(run) == []


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("RUNNING", "job 6 was requeued and continues"),
        ("PENDING", "job 6 was requeued and continues"),
        ("CANCELLED", "job 6 was cancelled while it waited"),
        ("COMPLETED", ""),
    ],
)
def test_a_follow_up_asks_what_has_become_of_its_parent(
    site: Site, run: RunDir, capsys: pytest.CaptureFixture[str], state: str, says: str
) -> None:
    site.program("scontrol", f"echo JobId=6 JobState={state} Restarts=0")
    earlier(run, slurm=True, job_id="6")
    ledger.end(run, 1, 85, "preempted", "follow-up")
    assert bool(host.begin(run, 1, 1)) is (not says)
    assert says in capsys.readouterr().err


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize("state", ["PREEMPTED", "TIMEOUT", "NODE_FAIL"])
def test_a_follow_up_reads_the_state_of_a_parent_whose_words_are_elsewhere(
    site: Site, run: RunDir, state: str
) -> None:
    site.program("scontrol", f"echo JobId=6 JobState={state} Restarts=0")
    earlier(run, slurm=True, job_id="6")
    assert host.begin(run, 1, 1, look=True)


@pytest.mark.usefixtures("in_slurm")
def test_a_job_that_is_back_cancels_what_was_to_follow_it(site: Site, run: RunDir) -> None:
    site.program("scancel", f"echo $* >>{site.folder}/asked")
    rows = [f"{job}|PENDING|None|x|x||{run.script} {of}|{run.name}" for job, of in ((8, 1), (9, 2))]
    site.program("squeue", f"printf '%s\\n' '{rows[0]}' '{rows[1]}'")
    earlier(run, slurm=True, job_id="7")
    ledger.end(run, 1, 85, "preempted", "requeue")
    site.program("scontrol", "echo JobId=7 JobState=RUNNING Restarts=1")
    assert host.begin(run, os.getpid())
    mine = ledger.last(run)
    assert mine and sentry.Sentry(run, mine, -1)._drop_follow_ups()
    assert (site.folder / "asked").read_text() == "--state=PENDING 8\n"


@pytest.mark.usefixtures("in_slurm")
def test_a_job_hears_what_was_asked_of_the_one_in_whose_place_it_began(run: RunDir) -> None:
    write_json(run.request, {"want": "stop", "job_id": "6"})
    assert host.main(["begin", str(run.path), "1", "0", f"{run.path}/", "instead=6"]) == 0
    assert ledger.attempts(run) == [] and run.request.exists()
    assert host.main(["begin", str(run.path), "1", "0", f"{run.path}/", "instead=5"]) == 0
    assert len(ledger.attempts(run)) == 1


@pytest.mark.usefixtures("in_slurm")
def test_a_follow_up_looks_itself_why_its_parent_ended(site: Site, run: RunDir) -> None:
    words = site.folder / "said"
    site.program("scontrol", "echo JobId=6 JobState=FAILED Restarts=0 ExitCode=0:9")
    for said, begins in (("CANCELLED AT x ***", False), ("CANCELLED AT x DUE TO PREEMPTION", True)):
        earlier(run, slurm=True, job_id="6", said=str(words))
        words.write_text(f"error: *** JOB 6 ON n1 {said}\n")
        newest = ledger.last(run)
        assert newest and bool(host.begin(run, 1, newest.number, look=True)) is begins
    earlier(run, slurm=True, job_id="6")  # a script that was killed: Slurm has no words
    newest = ledger.last(run)
    assert newest and host.begin(run, 1, newest.number, look=True)
    assert (ledger.read(run.attempt(newest.number)) or newest).cause == "script killed"


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("scontrol", "sinfo", "failed"),
    [
        ("echo JobState=RUNNING Restarts=1", "echo 'n2|idle'", True),  # n1 does not answer
        ("echo JobState=RUNNING Restarts=1", "echo 'n[1-2]|idle'", False),
        ("echo JobState=RUNNING Restarts=1", "exit 1", False),
        ("echo JobState=NODE_FAIL Restarts=0", "echo 'n[1-2]|idle'", True),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "echo 'n2|idle'", False),
    ],
)
def test_a_failure_counts_against_a_node_if_slurm_knows_of_it(
    site: Site, run: RunDir, scontrol: str, sinfo: str, failed: bool
) -> None:
    site.program("scontrol", scontrol)
    site.program("sinfo", sinfo)
    earlier(run, slurm=True, job_id="7", nodes="n[1-2]")
    before = ledger.last(run)
    assert before
    claim.close(run, before, ledger.new_attempt("8", 1, slurm=True))
    assert before.cause == "node failure"  # as far as it is known
    lines = run.node_events.read_text().splitlines() if run.node_events.exists() else []
    assert [event.host for event in node_events.read(lines)] == ["n1"] * failed


@pytest.mark.usefixtures("in_slurm")
def test_an_end_that_could_not_be_written_is_known_by_the_restart_in_place(
    run: RunDir, site: Site
) -> None:
    """The ranks failed, since the script went on in the same allocation."""
    site.program("scontrol", "echo JobState=RUNNING Restarts=0")
    assert host.begin(run, 1)
    assert host.begin(run, 1)
    closed = ledger.read(run.attempt(1))
    assert closed and (closed.cause, closed.action) == ("crash", "here")


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize("job_restarts", ["", "1"])
def test_an_attempt_in_the_same_allocation_asks_slurm_nothing(
    run: RunDir, site: Site, monkeypatch: pytest.MonkeyPatch, job_restarts: str
) -> None:
    """It goes on from the facts of the one before; a requeued job asks anew."""
    site.program("scontrol", f"echo >>{site.folder}/asked; exit 1")
    assert host.begin(run, 1)
    (site.folder / "asked").unlink()
    first = ledger.last(run)
    assert first
    first.cause, first.action, first.said_size, first.deadline = "crash", "here", 17, 2e9
    write_json(run.attempt(1).facts, asdict(first))
    monkeypatch.setenv("SLURM_RESTART_COUNT", job_restarts)
    assert host.begin(run, 1)
    second = ledger.last(run)
    assert second and second.number == 2
    again = (second.said_size, second.deadline) == (17, 2e9)
    assert again is (not job_restarts) is not (site.folder / "asked").exists()
