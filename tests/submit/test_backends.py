"""What each backend does with a script and its job: submit, look, ask to stop, cancel.

Slurm's programs are small executables on PATH; the other backend starts real processes.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import wait_for
from sites import Site
from submitted import begun, planned, queue, run_of, submitted

from hpcddp import processes
from hpcddp.errors import HpcddpError, SlurmUnreachable, SubmissionRefused
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir
from hpcddp.slurm.commands import QueuedJob
from hpcddp.submit import prepare, status, submission
from hpcddp.submit.backends import BACKENDS

SLURM, LOCAL = BACKENDS["slurm"], BACKENDS["local"]

AWAY = 'echo "x: error: Unable to contact slurm controller" >&2; exit 1'
TIMED_OUT = 'echo x >>sbatches; echo "sbatch: error: Socket timed out" >&2; exit 1'
# A squeue that knows a job of the name that it is asked for.
SAME_NAME = """echo "$*" >squeues
for w; do case $w in --name=*) n=${w#--name=};; esac; done
echo "43|STATE|Priority|x|x|||$n"
"""


def submit(site: Site, sbatch: str, squeue: str = "exit 0") -> tuple[RunDir, Callable[[], str]]:
    """A new run, and its submission to a Slurm with these programs."""
    site.program("sbatch", sbatch)
    site.program("squeue", squeue)
    site.program("srun", "exit 0")  # submitit looks for it
    plan = planned(site)
    run = prepare.new_run(plan, site.runs)
    return run, lambda: SLURM.submit(plan, run, print)


@pytest.mark.parametrize(
    ("sbatch", "words"),
    [
        ("echo 'sbatch: error: invalid partition specified: no' >&2; exit 1", "invalid partition"),
        ("echo note >&2; echo 'sbatch: error: QOS is not allowed' >&2; exit 1", "QOS is not"),
    ],
)
def test_a_refusal_has_slurms_words_and_is_not_looked_up(
    site: Site, sbatch: str, words: str
) -> None:
    run, go = submit(site, sbatch, "touch asked")
    with pytest.raises(SubmissionRefused, match=f"sbatch refused the job: .*{words}") as caught:
        go()
    assert caught.value.where == str(run.script)
    assert not Path("asked").exists()


NO_MEMORY = """
[ $1 = --test-only ] && s=$(cat) || { s=$(cat $1); echo x >>sbatches; }
case $s in *'SBATCH --mem='*) echo 'sbatch: error: no --mem here' >&2; exit 1;; esac
[ $1 = --test-only ] && exit
"""


def refused_for_memory(site: Site, then: str, memory: int = 8000) -> tuple[RunDir, Plan]:
    """A new run on a site whose plugin refuses --mem; `then` is what sbatch does without it."""
    site.slurm(sbatch=NO_MEMORY + then)
    plan = planned(site) if memory else planned(site, **{"slurm.mem": "8000M"})
    plan = replace(plan, memory=memory)
    return prepare.new_run(plan, site.runs), plan


def test_a_job_refused_for_the_memory_that_hpcddp_added_is_submitted_without_it(
    site: Site,
) -> None:
    run, plan = refused_for_memory(site, "echo Submitted batch job 7")
    with_memory, notes = run.script.read_text(), list[str]()
    assert submission.submit(plan, run, new=True, note=notes.append) == "7"
    assert Path("sbatches").read_text() == "x\n" * 2
    assert with_memory.replace("#SBATCH --mem=8000M\n", "") == run.script.read_text() != with_memory
    assert os.access(run.script, os.X_OK)
    assert status.status(run).job_id == "7"
    (note,) = notes
    assert "set mem = false in [slurm] of the profile" in note


@pytest.mark.parametrize(
    ("then", "error", "words"),
    [
        ("echo 'sbatch: error: no more jobs' >&2; exit 1", SubmissionRefused, "no more jobs"),
        (AWAY, SlurmUnreachable, "may have been submitted or not"),
    ],
)
def test_a_second_submission_that_fails_is_the_last(
    site: Site, then: str, error: type[HpcddpError], words: str
) -> None:
    run, plan = refused_for_memory(site, then)
    site.program("squeue", AWAY)
    notes: list[str] = []
    with pytest.raises(error, match=words):
        SLURM.submit(plan, run, notes.append)
    assert Path("sbatches").read_text() == "x\n" * 2 and not notes


def test_memory_that_the_user_asked_for_stays_and_is_refused(site: Site) -> None:
    run, plan = refused_for_memory(site, "echo Submitted batch job 7", memory=0)
    with pytest.raises(SubmissionRefused, match="no --mem here"):
        SLURM.submit(plan, run, print)
    assert Path("sbatches").read_text() == "x\n"
    assert "#SBATCH --mem=8000M\n" in run.script.read_text()


def test_an_sbatch_that_failed_though_the_job_exists_is_not_repeated(site: Site) -> None:
    run, go = submit(site, TIMED_OUT, SAME_NAME.replace("STATE", "PENDING"))
    assert go() == "43"
    assert Path("sbatches").read_text() == "x\n"
    assert f"--name={run.name}" in Path("squeues").read_text()


@pytest.mark.parametrize(
    ("squeue", "hint"),
    [
        (AWAY, "do not submit it again"),  # whether there is a job is unknown
        ("exit 0", "no job was submitted; try again later"),
        (SAME_NAME.replace("STATE", "COMPLETED"), "no job was submitted; try again later"),
    ],
)
@pytest.mark.parametrize("sbatch", [AWAY, TIMED_OUT, "exit 1"])
def test_where_nobody_answers_nothing_is_claimed(
    site: Site, sbatch: str, squeue: str, hint: str
) -> None:
    run, go = submit(site, sbatch, squeue)
    with pytest.raises(SlurmUnreachable) as caught:
        go()
    assert hint in caught.value.hint
    unknown = caught.value.where == str(run.script)
    assert unknown == (squeue == AWAY)


def test_a_job_of_slurm_is_looked_up_by_its_id_and_its_runs_name(site: Site) -> None:
    run = submitted(run_of(site))
    queue(site, "8|RUNNING|None|x|x|n1||toy-1", "7|PENDING|Priority|x|x|||toy-1")
    assert SLURM.look(run, "7") == QueuedJob("7", "PENDING", "Priority", None, None, "", "toy-1")
    assert SLURM.look(run, "9") is None


@pytest.mark.parametrize(
    ("act", "call"),
    [
        (SLURM.tell, "--state=RUNNING --signal=USR2 7"),  # to the ranks, of a job that runs alone
        (SLURM.drop, "--state=PENDING 7"),
        (SLURM.cancel, "7"),
    ],
)
def test_slurm_is_asked_to_end_a_job_as_far_as_its_state_allows(
    site: Site, act: Callable[[str], None], call: str
) -> None:
    site.program("scancel", 'echo "$*" >>cancelled')
    act("7")
    assert Path("cancelled").read_text() == f"{call}\n"


# This machine, with real processes.


@pytest.fixture
def start(site: Site) -> Iterator[Callable[[str], tuple[RunDir, str]]]:
    """Submits a shell script: the run, and the job's id."""
    jobs = []

    def submit(text: str) -> tuple[RunDir, str]:
        plan = planned(site, "local")
        run = prepare.new_run(plan, site.runs)
        run.script.write_text(text)
        jobs.append(LOCAL.submit(plan, run, print))
        return run, jobs[-1]

    yield submit
    for job_id in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(job_id), signal.SIGKILL)


SLEEPS = "echo $PWD ${SLURM_JOB_ID-none}\nsleep 600 &\necho child $!\nwait\n"


def child(run: RunDir) -> int:
    """The process that the script has started."""
    log = run.job_log("local")
    return int(wait_for(lambda: log.read_text().partition("child ")[2], "its child"))


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_script_here_is_a_session_of_its_own_in_the_jobs_folder(
    site: Site, start: Callable[[str], tuple[RunDir, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "99")  # of a job that the command itself runs in
    run, job_id = start(SLEEPS)
    assert os.getsid(int(job_id)) == int(job_id) == os.getsid(child(run))
    assert run.job_log("local").read_text().startswith(f"{site.folder} none\n")


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_script_here_is_cancelled_with_all_that_it_started(
    site: Site, start: Callable[[str], tuple[RunDir, str]]
) -> None:
    run, job_id = start(SLEEPS)
    pid = child(run)
    for act in (LOCAL.tell, LOCAL.drop):  # its ranks look into the run dir, and no job waits here
        act(job_id)
    row = LOCAL.look(run, job_id)
    assert row and (row.job_id, row.state, row.name) == (job_id, "RUNNING", run.name)
    LOCAL.cancel(job_id)
    for gone in (pid, int(job_id)):
        wait_for(lambda gone=gone: not processes.start_of(gone), "the end of its processes")
    assert LOCAL.look(run, job_id) is None
    LOCAL.cancel(job_id)  # nothing is there any more


def test_an_attempt_here_is_looked_up_in_the_process_table(site: Site) -> None:
    mine: dict[str, Any] = {
        "pid": os.getpid(),
        "pid_start": processes.start_of(os.getpid()),
        "slurm": False,
    }
    run = begun(submitted(run_of(site, backend="local"), "70"), "70", **mine)
    assert LOCAL.look(run, "70") and status.status(run).state == "RUNNING"
    later = mine | {"pid_start": "1"}  # the id belongs to another process by now
    gone = begun(submitted(run_of(site, "gone", "local"), "71"), "71", **later)
    assert LOCAL.look(gone, "71") is None and status.status(gone).state == "LOST"


def test_an_attempt_on_another_machine_is_not_called_lost(site: Site) -> None:
    run = begun(submitted(run_of(site, backend="local")), slurm=False, host="elsewhere")
    with pytest.raises(SlurmUnreachable, match="the run is on elsewhere") as caught:
        LOCAL.look(run, "7")
    assert caught.value.hint == "run the command there: ssh elsewhere"
    seen = status.status(run)
    assert (seen.state, seen.stale) == ("RUNNING", True)
    assert "elsewhere" in seen.reason
