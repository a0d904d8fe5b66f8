import time
from pathlib import Path

import pytest
from sites import Site

from hpcddp.attempt import surrounding_job
from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import sbatch
from hpcddp.slurm.commands import JobInfo, QueuedJob


def test_slurms_programs_get_a_clean_environment(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = 'printf "%s\\n" "${SLURM_JOB_ID-gone} ${SLURM_CONF-gone} ${SLURM_TIME_FORMAT-gone}"'
    site.program("squeue", seen)
    site.program("sbatch", seen)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert slurm.call("squeue").stdout == "gone /etc/slurm.conf %s\n"
    assert slurm.call("sbatch").stdout == "gone /etc/slurm.conf gone\n"  # the job would have it


def test_a_users_filters_hide_no_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.program("squeue", 'echo "${SQUEUE_PARTITION-gone} ${SINFO_STATES-gone}"')
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setenv("SINFO_STATES", "down")
    assert slurm.call("squeue").stdout == "gone gone\n"


def test_a_queue_is_read_by_fields(site: Site) -> None:
    site.program(
        "squeue",
        'echo "slurm_load_jobs: a warning" >&2\n'
        'echo "12|PENDING|Resources|1893456000|N/A|||toy-1"\n'
        'echo "13|RUNNING|None|1893456000|2030-01-01T00:01:00|n[1-2]||a|b"\n'
        "echo noise",
    )
    first, second = slurm.queue()
    assert first == QueuedJob("12", "PENDING", "Resources", 1893456000.0, None, "", "toy-1")
    assert first.live
    assert (second.hosts, second.name) == ("n[1-2]", "a|b")
    assert second.start == time.mktime((2030, 1, 1, 0, 1, 0, 0, 0, -1))  # of an older Slurm


# Answers as squeue does: with the jobs of the name that was asked for, if one was.
BY_NAME = """
for word; do case $word in --name=*) name=${word#--name=};; esac; done
[ "${name-somebody-elses}" = somebody-elses ] && echo "12|RUNNING|None|x|x|n1||somebody-elses"
exit 0
"""


def test_a_job_id_that_was_given_out_again_is_not_ours(site: Site) -> None:
    site.program("squeue", BY_NAME)
    assert slurm.job("12", "toy-1") is None
    assert slurm.job("12", "somebody-elses") is not None


def test_of_jobs_of_one_name_the_id_tells_which(site: Site) -> None:
    site.program("squeue", 'for n in 14 13; do echo "$n|RUNNING|None|x|x|n$n||toy-1"; done')
    row = slurm.job("13", "toy-1")
    assert row and row.hosts == "n13"


def test_a_squeue_that_fails_is_no_empty_queue(site: Site) -> None:
    site.program("squeue", "echo 'squeue: error: Invalid user' >&2; exit 1")
    with pytest.raises(SlurmUnreachable, match="Invalid user"):
        slurm.queue()


def test_an_ended_job_is_not_live(site: Site) -> None:
    site.program("squeue", 'echo "12|CANCELLED|None|x|x|n1||toy-1"')
    row = slurm.job("12", "toy-1")
    assert row and not row.live


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (None, "squeue not found"),
        ("echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1", "^Unable to"),
        ("exec sleep 60", "did not answer in 0.2 s"),
    ],
)
def test_slurm_out_of_reach(
    site: Site, monkeypatch: pytest.MonkeyPatch, program: str | None, what: str
) -> None:
    if program:
        site.program("squeue", program)
    with pytest.raises(SlurmUnreachable, match=what):
        slurm.call("squeue", timeout=0.2 if program and "sleep" in program else 8)


def test_a_shell_of_a_sandbox_that_is_down_does_not_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.slurm(squeue="touch asked")
    monkeypatch.setenv("HPCDDP_SANDBOX", "box")
    monkeypatch.setenv("SLURM_CONF", str(site.folder / "gone.conf"))
    for ask in (slurm.queue, sbatch.answers):
        with pytest.raises(SlurmUnreachable, match="the sandbox of this shell is down") as caught:
            ask()
        assert "unset SLURM_CONF HPCDDP_SANDBOX" in caught.value.hint
    assert not Path("asked").exists()
    site.write("gone.conf", "")
    assert sbatch.answers() and slurm.queue() == []


def test_cancel_and_signal(site: Site) -> None:
    site.program("scancel", 'echo "$@" >>seen')
    slurm.cancel("12")
    slurm.cancel("12", signal="USR2")
    assert Path("seen").read_text() == "12\n--signal=USR2 12\n"


def test_the_first_line_that_says_something() -> None:
    assert slurm.first_line("\n sbatch: error: invalid partition\nsbatch: error: x") == (
        "invalid partition"
    )
    assert slurm.first_line("\n") == "no message"


def test_what_slurm_says_of_a_job(site: Site) -> None:
    said = "JobId=7 JobName=x JobState=RUNNING Reason=None Requeue=1 Restarts=2 RunTime=00:01:00"
    times = "EndTime=2030-01-01T00:00:00 PreemptEligibleTime=2029-12-31T00:00:00 PreemptTime="
    site.program("scontrol", f"echo {said} {times}None")
    end = time.mktime((2030, 1, 1, 0, 0, 0, 0, 0, -1))
    assert slurm.facts("7") == JobInfo("RUNNING", "None", 2, False, end)
    site.program("scontrol", f"echo {said} {times}2029-12-31T23:00:00")
    assert slurm.facts("7") == JobInfo("RUNNING", "None", 2, True, end)
    site.program("scontrol", f"echo {said} EndTime=1893456000 PreemptTime=1893455000")
    assert slurm.facts("7") == JobInfo("RUNNING", "None", 2, True, 1893456000.0)
    site.program("scontrol", "echo JobId=7 JobState=PENDING Reason=Resources EndTime=Unknown")
    assert slurm.facts("7") == JobInfo("PENDING", "Resources")
    site.program("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.facts("7") is None


def test_squeue_is_asked_where_there_is_no_scontrol(site: Site) -> None:
    site.program("squeue", "echo 'COMPLETING|None|1|2029-12-31T23:00:00|Unknown|'")
    assert slurm.facts("7") == JobInfo("COMPLETING", "None", 1, True)
    site.program("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmUnreachable):
        slurm.facts("7")


@pytest.mark.parametrize(
    ("answers", "refused", "asked"),
    [
        ("exit 0", "", ["requeue 7"]),
        ("echo 'Job is pending execution for job 7' >&2; exit 1", "", ["requeue 7"]),
        ("echo 'Invalid job id specified' >&2; exit 1", "Invalid job id specified", ["requeue 7"]),
        (
            '[ "$1" = update ] || [ -e "$allowed" ] || { touch "$allowed"; '
            "echo 'Requested operation is presently disabled for job 7' >&2; exit 1; }",
            "",
            ["requeue 7", "update JobId=7 Requeue=1", "requeue 7"],
        ),
    ],
)
def test_queueing_a_job_again(site: Site, answers: str, refused: str, asked: list[str]) -> None:
    log = site.folder / "asked"
    site.program("scontrol", f'echo "$*" >>{log}; allowed={site.folder}/allowed; {answers}')
    assert slurm.requeue("7") == refused
    assert log.read_text().splitlines() == asked


def test_it_is_queued_again_as_submitit_does_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from submitit.slurm.slurm import SlurmJobEnvironment

    log = site.folder / "asked"
    site.program("scontrol", f'echo "$*" >>{log}')
    for names in ({"JOB_ID": "12"}, {"ARRAY_JOB_ID": "11", "ARRAY_TASK_ID": "1"}):
        for name, value in names.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        SlurmJobEnvironment()._requeue(countdown=3)
        assert slurm.requeue(surrounding_job.my_job()) == ""
    theirs, ours = log.read_text().splitlines()[0::2], log.read_text().splitlines()[1::2]
    assert theirs == ours and ours[-1] == "requeue 11_1"
