import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import wait_for
from sites import Outcome, Site
from submitted import planned

from hpcddp import processes
from hpcddp.attempt import claim, decision, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import RunError, SlurmUnreachable, SubmissionRefused
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.submit import prepare, status, submission

# A local run is meant to outlive the command that started it.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

LOCAL = "{% extends 'local.sh.j2' %}{% block launch %}LAUNCH &\n{% endblock %}"


@pytest.fixture
def local(site: Site) -> Iterator[Callable[[str], RunDir]]:
    """Submits a local job whose ranks are one small shell program."""
    runs: list[RunDir] = []

    def start(launch: str) -> RunDir:
        site.write("mine.sh.j2", LOCAL.replace("LAUNCH", launch))
        made = planned(site, "local", template="mine.sh.j2")
        run = prepare.new_run(made, site.runs)
        submission.submit(made, run)
        runs.append(run)
        return run

    yield start
    for run in runs:
        if (read_json(run.submission) or {}).get("job_id"):
            submission.kill_local(run)


def ended(run: RunDir) -> ledger.Attempt:
    def over() -> bool:
        last = ledger.last(run)
        return last is not None and not last.live and last.action == decision.NONE

    wait_for(over, "the end of the run")
    attempt = ledger.last(run)
    assert attempt
    return attempt


# Slurm, answered for by small programs.


def sbatch(site: Site, text: str) -> None:
    site.program("sbatch", text)
    site.program("srun", "exit 0")  # submitit looks for it


def test_a_refusal_is_told_in_slurms_words_and_kept(site: Site) -> None:
    sbatch(site, 'echo "sbatch: error: invalid partition specified: no" >&2; exit 1')
    site.program("squeue", "exit 0")
    made = planned(site)
    run = prepare.new_run(made, site.runs)
    with pytest.raises(SubmissionRefused, match="invalid partition specified: no") as caught:
        submission.submit(made, run)
    assert caught.value.exit_code == 1
    assert caught.value.where == str(run.script) and run.script.is_file()
    refused = status.status(run)
    assert refused.state == "REFUSED" and "invalid partition" in refused.reason


AWAY = 'echo "x: error: Unable to contact slurm controller (REASON)" >&2; exit 1'
LOST, UNSENT = AWAY.replace("REASON", "receive failure"), AWAY.replace("REASON", "connect failure")


def test_a_job_that_may_exist_keeps_its_run(site: Site) -> None:
    sbatch(site, LOST)
    site.program("squeue", LOST)
    made = planned(site)
    run = prepare.new_run(made, site.runs)
    with pytest.raises(SlurmUnreachable, match="may have been submitted or not") as caught:
        submission.submit(made, run)
    assert f"hpcddp status {run.name}" in caught.value.hint
    assert (read_json(run.submission) or {})["job_id"] is None


def test_an_unreachable_slurm_leaves_no_run(site: Site, hpcddp: Callable[..., Outcome]) -> None:
    site.slurm(sbatch=f"[ $1 != --version ] || exit 0; {UNSENT}", squeue="touch asked")
    done = hpcddp("submit", "toy", "--nodes", "2", "--gpus", "4")
    assert done.code == 3 and not [*site.runs.iterdir()], done.text
    assert done.err.count("Unable to contact") == 1 and "no job was submitted" in done.err
    assert not Path("asked").exists()  # it is certain already


@pytest.mark.parametrize("words", [UNSENT, LOST])
def test_an_unreachable_slurm_leaves_a_resumed_run_as_it_was(site: Site, words: str) -> None:
    run = pending(site)
    before = read_json(run.submission)
    sbatch(site, words)
    site.program("squeue", "exit 0")
    with pytest.raises(SlurmUnreachable, match="Unable to contact"):
        submission.submit(planned(site), run)
    assert read_json(run.submission) == before and run.script.exists()


def test_an_unreachable_slurm_leaves_a_rendered_run(site: Site) -> None:
    """Its script may be in Slurm's queue, from plain sbatch."""
    made = planned(site)
    run = prepare.new_run(made, site.runs)
    sbatch(site, UNSENT)
    with pytest.raises(SlurmUnreachable, match="Unable to contact"):
        submission.submit(made, run)
    assert run.script.exists() and not run.submission.exists()


def pending(site: Site, job_id: str = "7", state: str = "PENDING") -> RunDir:
    run = prepare.new_run(planned(site), site.runs)
    write_json(run.submission, {"job_id": job_id, "submitted": time.time()})
    site.program("squeue", f"echo '{job_id}|{state}|None|x|x|||{run.name}'")
    site.program("scancel", 'echo "$*" >>cancelled')
    return run


def test_a_person_who_cancels_is_not_sent_away_by_one_lost_answer(site: Site) -> None:
    run = pending(site)
    row = f"7|PENDING|None|x|x|||{run.name}"
    lost = "echo 'squeue: error: Zero Bytes were transmitted' >&2; exit 1"
    site.program("squeue", f"[ -e asked ] && echo '{row}' || {{ touch asked; {lost}; }}")
    submission.request(run, "cancel")
    assert Path("cancelled").read_text() == "7\n"


def test_a_cancel_reaches_a_follow_up_that_is_on_its_way_and_no_strangers_job(site: Site) -> None:
    run = pending(site)
    facts = ledger.begin(
        run, Attempt(0, "7", "n1", 1, "1", True, "n1", time.time()), lambda a: True
    )
    assert facts
    ledger.end(run, 1, 85, decision.PREEMPTED, decision.FOLLOW)
    site.program("squeue", "echo '7|RUNNING|None|x|x|||of another'")
    submission.request(run, "cancel")
    assert not Path("cancelled").exists()
    assert claim.asked(run, "8", 1) == "cancel"


STOP = "--state=PENDING 7\n--state=RUNNING --signal=USR2 7"


@pytest.mark.parametrize(
    ("want", "state", "call"),
    [
        ("stop", "RUNNING", STOP),
        ("stop", "PENDING", STOP),  # it may begin in between, and is cancelled only if it waits
        ("cancel", "RUNNING", "7"),
        ("cancel", "PENDING", "7"),
    ],
)
def test_a_request_lies_in_the_folder_and_reaches_slurm(
    site: Site, want: str, state: str, call: str
) -> None:
    run = pending(site, state=state)
    assert submission.request(run, want).state == state
    assert (site.folder / "cancelled").read_text() == call + "\n"
    asked = read_json(run.request) or {}
    assert (asked["want"], asked["job_id"]) == (want, "7")


def test_nothing_is_asked_of_what_ended_or_cannot_be_seen(site: Site) -> None:
    rendered = prepare.new_run(planned(site), site.runs)
    with pytest.raises(RunError, match="cannot stop a run that is RENDERED"):
        submission.request(rendered, "stop")
    run = pending(site)
    site.program("squeue", "echo 'Unable to contact x' >&2; exit 1")
    with pytest.raises(SlurmUnreachable):
        submission.request(run, "stop")
    with pytest.raises(SlurmUnreachable):
        submission.check_ended(run)
    assert not run.request.exists() and not (site.folder / "cancelled").exists()


def test_a_run_that_lives_cannot_be_resumed(site: Site) -> None:
    run = pending(site)
    with pytest.raises(RunError, match="the run has not ended: job 7 is PENDING") as caught:
        submission.check_ended(run)
    assert f"hpcddp stop {run.name}" in caught.value.hint


# This machine, with real processes.


def test_a_local_run_ends_with_its_outcome(site: Site, local: Callable[[str], RunDir]) -> None:
    run = local("bash -c 'echo hello; exit 3'")
    attempt = ended(run)
    assert (attempt.cause, attempt.exit_code, attempt.slurm) == ("crash", 3, False)
    assert attempt.job_id == (read_json(run.submission) or {})["job_id"]
    assert "hello\n" in run.log.read_text()
    assert status.status(run).state == "FAILED"


@pytest.mark.parametrize("block", ["setup", "finish"])
@pytest.mark.parametrize("backend", ["local", "slurm"])
def test_a_sites_profile_may_read_unset_variables(site: Site, backend: str, block: str) -> None:
    """The template of README's example; what the blocks are followed by runs with set -u again."""
    site.write("profile.sh", 'echo "site $SITE_FLAGS end"; SITE_LEVEL=$((SITE_LEVEL + 1))\n')
    lines = f"source {site.folder}/profile.sh\n{{{{ super() }}}}\n"
    launch = "{% block launch %}echo $- &\n{% endblock %}"
    text = f"{{% block {block} %}}\n{lines}{{% endblock %}}{launch}"
    site.write("mine.sh.j2", f"{{% extends '{backend}.sh.j2' %}}{text}")
    made = planned(site, "local", template="mine.sh.j2")
    run = prepare.new_run(made, site.runs)
    submission.submit(made, run)
    assert ended(run).cause == "done"
    said = "".join(path.read_text() for path in (run.job_log("local"), run.log))
    assert "site  end\n" in said and "unbound" not in said
    assert "\nhuB\n" in f"\n{said}"  # the flags of the shell that starts the ranks


def test_a_local_run_in_a_job_of_slurm_is_not_taken_for_it(
    site: Site, local: Callable[[str], RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    monkeypatch.setenv("MASTER_PORT", "1")
    run = local("bash -c 'echo job ${SLURM_JOB_ID-none}'")
    attempt = ended(run)
    assert "job none" in run.log.read_text()
    assert attempt.job_id != "99" and not attempt.slurm


def test_a_cancelled_local_run_is_gone_with_its_ranks(
    site: Site, local: Callable[[str], RunDir]
) -> None:
    run = local("bash -c 'echo pid $$; exec sleep 600'")
    wait_for(lambda: run.log.exists() and "pid " in run.log.read_text(), "its pid")
    assert status.status(run).state == "RUNNING"
    pid = int(run.log.read_text().split("pid ")[1].split()[0])
    submission.request(run, "cancel")
    assert ended(run).cause == "cancelled"
    assert not processes.start_of(pid)
    assert status.status(run).state == "CANCELLED"


def test_a_killed_local_run_leaves_no_process(site: Site, local: Callable[[str], RunDir]) -> None:
    run = local("bash -c 'trap \"\" TERM; echo pid $$; exec sleep 600'")
    wait_for(lambda: run.log.exists() and "pid " in run.log.read_text(), "its pid")
    pid = int(run.log.read_text().split("pid ")[1].split()[0])
    submission.kill_local(run)
    wait_for(lambda: not processes.start_of(pid), "its end")
    wait_for(lambda: status.status(run).state == "CANCELLED", "the state")


# Names.


def runs(site: Site, *names: str) -> None:
    for when, name in enumerate(names):
        run = RunDir(site.runs / name)
        run.create()
        write_json(run.job, {})
        os.utime(run.job, ns=(when, when))


def test_a_run_is_a_name_a_prefix_a_job_id_last_or_a_path(site: Site) -> None:
    runs(site, "toy-1", "toy-12", "digits-1")
    facts = Attempt(0, "77", "n1", 1, "1", True, "n1", 1.0)
    ledger.begin(RunDir(site.runs / "toy-12"), facts, lambda earlier: False)
    facts = {"job_id": "5", "submitted": 0.5}
    write_json(site.runs / "toy-1" / "submission.json", facts)
    for token, name in {
        "toy-1": "toy-1",  # whole names come before prefixes
        "toy-12": "toy-12",
        "d": "digits-1",
        "77": "toy-12",
        "5": "toy-1",
        "last": "toy-12",  # digits-1 was only rendered
        "runs/toy-1": "toy-1",
        str(site.runs / "toy-12"): "toy-12",
    }.items():
        assert submission.find(site.runs, token).name == name


@pytest.mark.parametrize(
    ("token", "what"),
    [
        ("toy", "'toy' matches 2 runs: toy-12, toy-1"),
        ("7", "no run '7'"),
        ("", "matches 3 runs"),
        ("../x", "no run"),
    ],
)
def test_a_word_that_means_no_run_or_several(site: Site, token: str, what: str) -> None:
    runs(site, "toy-1", "toy-12", "digits-1")
    with pytest.raises(RunError, match=what):
        submission.find(site.runs, token)


def test_last_is_the_run_that_was_submitted_last(site: Site) -> None:
    runs(site, "toy-1", "toy-2", "toy-3", "toy-4")
    for name, when in (("toy-1", 20.0), ("toy-2", 10.0)):  # that of a resumed run is new
        facts = {"job_id": "5", "submitted": when}
        write_json(site.runs / name / "submission.json", facts)
    assert submission.find(site.runs, "last").name == "toy-1"
    facts = Attempt(0, "77", "n1", 1, "1", True, "n1", 30.0)  # by plain sbatch
    ledger.begin(RunDir(site.runs / "toy-3"), facts, lambda earlier: False)
    assert submission.find(site.runs, "last").name == "toy-3"


def test_last_of_runs_that_were_only_rendered_is_none(site: Site) -> None:
    runs(site, "toy-1", "toy-2")
    with pytest.raises(RunError, match="no run in this folder was submitted yet") as caught:
        submission.find(site.runs, "last")
    assert "name the rendered run, toy-2; or start a run with `hpcddp submit`" in caught.value.hint


@pytest.mark.parametrize("token", ["last", "toy-1"])
def test_a_folder_without_runs_says_how_to_start_one(site: Site, token: str) -> None:
    for root in (site.folder, site.folder / "missing"):
        with pytest.raises(RunError, match="no runs yet") as caught:
            submission.find(root, token)
        assert caught.value.where == str(root) and caught.value.exit_code == 2
        assert "start a run with `hpcddp submit`" in caught.value.hint


def test_runs_that_is_no_folder_is_a_plain_error(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    for words in (["ls"], ["status"], ["stop", "last"]):
        done = hpcddp(*words, "--runs", "/etc/passwd")
        assert done.code == 2 and "/etc/passwd: not a folder" in done.err, words
    done = hpcddp("submit", "toy", "--cluster", "local", "--runs", "/etc/passwd")
    assert done.code == 2 and "/etc/passwd" in done.err and "--runs" in done.err


def test_runs_that_does_not_exist_is_a_plain_error(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    assert status.status_all(Path("/nonexistent")) == []
    for words in (["ls"], ["status"]):  # the command line checks it too
        done = hpcddp(*words, "--runs", "/nonexistent")
        assert done.code == 2 and done.err.startswith("error: /nonexistent: no such folder"), words
