"""How an attempt ends: what becomes of its run."""

import os
import subprocess
import sys

import pytest
from lives import earlier
from sites import Site, record_run

from hpcddp.attempt import claim, exit_codes, host, ledger
from hpcddp.rundir import RunDir, read_json, write_json


@pytest.mark.parametrize(
    ("code", "want", "cause", "action", "answer"),
    [
        (0, None, "done", "none", "0"),
        (0, "stop", "done", "none", "0"),
        (85, "stop", "stopped", "none", "0"),
        (85, None, "stopped", "none", "0"),
        (85, "preempt", "preempted", "requeue", "again"),
        (85, "cancel", "cancelled", "none", "1"),
        (143, "cancel", "cancelled", "none", "1"),
        (1, None, "crash", "requeue", "again"),
        (137, None, "crash", "requeue", "again"),
    ],
)
def test_how_a_life_ends(
    run: RunDir, capsys: pytest.CaptureFixture[str], code: int, want: str | None, cause: str,
    action: str, answer: str,
) -> None:  # fmt: skip
    host.begin(run, os.getpid())
    if want:
        write_json(run.request, {"want": want, "job_id": str(os.getpid())})
    assert host.main(["end", str(run.path), "1", str(code)]) == 0
    facts = read_json(run.attempt(1).facts) or {}
    assert (facts["cause"], facts["action"], facts["exit_code"]) == (cause, action, code)
    out, err = capsys.readouterr()
    assert out == f"{answer}\n"  # the script reads nothing else
    assert f": {cause}, exit code {code}; next: {action}" in err


def test_a_resumed_run_has_its_budgets_anew(run: RunDir) -> None:
    """Three crashes in a row ended it; a person mended it and went on."""
    for number in (1, 2, 3):
        host.begin(run, os.getpid())
        assert host.end(run, number, 1) == ("again" if number < 3 else "1")
    host.begin(run, os.getpid())
    assert host.end(run, 4, 1) == "again"


def test_what_nobody_brought_back_is_not_said_to_come(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that it is decided the job runs, and each time that it is acted on it does not."""
    looks: list[str] = []
    monkeypatch.setattr("hpcddp.attempt.requeue.bring_back", lambda *args: looks.append("") or "")
    host.begin(run, os.getpid())
    assert host.end(run, 1, 1) == "1"
    found = ledger.last(run)
    assert found and (found.cause, found.action, len(looks)) == ("crash", "none", host.LOOKS)


def test_an_older_life_writes_no_end(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    host.begin(run, os.getpid())
    host.begin(run, os.getpid())
    before = run.attempt(1).facts.read_bytes()
    assert host.main(["end", str(run.path), "1", "85"]) == 0
    assert capsys.readouterr().out == "1\n"
    assert run.attempt(1).facts.read_bytes() == before


def test_the_private_code_never_leaves(run: RunDir) -> None:
    host.begin(run, os.getpid())
    for want in ("stop", "cancel"):
        write_json(run.request, {"want": want})
        assert host.end(run, 1, exit_codes.STOPPED) != str(exit_codes.STOPPED)


def test_it_runs_without_the_users_own_modules(site: Site, run: RunDir) -> None:
    """-P keeps a socket.py in the current folder out."""
    site.write("socket.py", "raise SystemExit('imported')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hpcddp.attempt.host", "begin", run.path, str(os.getpid())],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("1 127.0.0.1 ")


@pytest.mark.parametrize(
    ("code", "told", "found"),
    [
        (143, "n2: task 3: Exited with exit code 7", 7),  # the others were ended for it
        (143, "n1: task 0: Terminated\nsrun: error: n2: task 3: Exited with exit code 7", 143),
        (143, "n2: task 3: Aborted (core dumped)\nsrun: error: n1: task 0: Terminated", 134),
        (143, "n2: tasks 2-3: Segmentation fault", 139),
        (143, "n2: task 3: Out Of Memory", 143),
        (143, "", 143),
        (3, "n2: task 3: Exited with exit code 2", 3),
    ],
)
def test_the_rank_that_failed_first_gives_a_program_its_exit_code(
    run: RunDir, code: int, told: str, found: int
) -> None:
    record_run(run, backend="local", spec={"command": ["python", "train.py"]})
    earlier(run)
    run.attempt(1).log.write_text(f"1: step 1\nsrun: error: {told}\n")
    assert host.main(["end", str(run.path), "1", str(code)]) == 0
    (ended,) = ledger.attempts(run)
    assert ended.exit_code == found


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("code", "ends", "answer"),
    [(85, ("node failure", "follow-up", "8"), "0"), (0, ("done", "none", "8"), "0")],
    ids=["cut off", "done meanwhile"],
)
def test_a_script_that_wakes_keeps_the_follow_up_of_another_node(
    site: Site, run: RunDir, capsys: pytest.CaptureFixture[str], code: int,
    ends: tuple[str, str, str], answer: str,
) -> None:  # fmt: skip
    """That node took it for lost, and has cancelled its job."""
    site.program("scontrol", "echo JobId=7 JobState=COMPLETING Restarts=0")
    site.program("squeue", "exit 0")
    end = {"cause": "node failure", "action": "follow-up", "successor": "8"}
    earlier(run, slurm=True, job_id="7", **end)
    assert host.main(["end", str(run.path), "1", str(code)]) == 0
    found = ledger.last(run)
    assert found and (found.cause, found.action, found.successor) == ends
    assert capsys.readouterr().out == f"{answer}\n"


@pytest.mark.usefixtures("in_slurm")
def test_a_full_disk_at_the_end_brings_the_run_back_all_the_same(
    site: Site, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.program("scontrol", f"echo $* >>{site.folder}/asked; echo JobState=RUNNING Restarts=0")
    assert host.begin(run, os.getpid())
    subprocess.run(["/bin/mount", "--bind", run.path, run.path], check=True)
    try:
        subprocess.run(["/bin/mount", "-o", "remount,ro,bind", run.path], check=True)
        assert host.main(["end", str(run.path), "1", "1"]) == 0
    finally:
        subprocess.run(["/bin/umount", "--lazy", run.path], check=True)
    out, err = capsys.readouterr()
    assert out == "0\n" and "not recorded" in err
    assert "requeue 7" in (site.folder / "asked").read_text()


def test_an_empty_mount_at_the_end_is_no_newer_attempt(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert host.begin(run, os.getpid())
    subprocess.run(["/bin/mount", "-t", "tmpfs", "tmpfs", run.path], check=True)
    try:
        assert host.main(["end", str(run.path), "1", "0"]) == host.AWAY
    finally:
        subprocess.run(["/bin/umount", "--lazy", run.path], check=True)
    assert capsys.readouterr().out == ""
    assert host.main(["end", str(run.path), "1", "0"]) == 0


@pytest.mark.usefixtures("in_slurm")
def test_words_that_come_while_slurm_answers_are_heard(site: Site, run: RunDir) -> None:
    """The answer says still that the job runs."""
    words = site.folder / "said"
    words.touch()
    told = "error: *** JOB 7 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***"
    ends = "echo JobState=COMPLETING Restarts=0"
    runs = f"{{ echo '{told}' >{words}; echo JobState=RUNNING Restarts=0; }}"
    site.program("scontrol", f"[ -s {words} ] && {ends} || {runs}")
    site.program("squeue", "exit 0")
    site.program("sbatch", "echo 8")
    earlier(run, slurm=True, job_id="7", said=str(words))
    assert host.main(["end", str(run.path), "1", "85"]) == 0
    found = ledger.last(run)
    assert found and (found.cause, found.action, found.successor) == (
        "time limit",
        "follow-up",
        "8",
    )


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(("code", "left"), [("0", False), ("85", True)])
def test_the_log_on_the_node_goes_with_the_run(
    site: Site, run: RunDir, code: str, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life of a job that is queued again writes there too."""
    monkeypatch.setattr(claim, "NODE_LOGS", str(site.folder))
    site.program("scontrol", "echo JobState=RUNNING Restarts=0")
    log = site.folder / "log"
    log.touch()
    earlier(run, slurm=True, job_id="7", node_log=str(log))
    assert host.main(["end", str(run.path), "1", code]) == 0
    assert log.exists() is left
