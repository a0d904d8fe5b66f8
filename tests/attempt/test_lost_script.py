"""What becomes of a run whose batch script is gone."""

import json
import time
from typing import Any

import pytest
from lives import earlier
from sites import Site

from hpcddp.attempt import decision, ledger, lost_script, requeue
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir, read_json, write_json

KILLED = "JobState=FAILED Restarts=0 ExitCode=0:9"


def mine(run: RunDir) -> Attempt:
    newest = ledger.last(run)
    assert newest
    return newest


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("facts", "asked", "ending"),
    [
        (KILLED, True, ("script killed", "follow-up", "8")),
        ("JobState=COMPLETED Restarts=0 ExitCode=0:0", False, (None, "", "")),
        ("JobState=CANCELLED Restarts=0 ExitCode=0:15", False, (None, "", "")),
        ("JobState=PENDING Restarts=1 ExitCode=0:0", False, (None, "", "")),  # Slurm has done it
        ("JobState=TIMEOUT Restarts=0 ExitCode=0:15", False, (None, "", "")),  # it has before
    ],
    ids=["killed", "done", "cancelled", "queued again", "time limit"],
)
def test_a_sentry_follows_only_a_job_whose_script_was_killed(
    site: Site, run: RunDir, facts: str, asked: bool, ending: tuple[str | None, str, str]
) -> None:
    calls = site.folder / "calls"
    site.program("scontrol", f"echo JobId=7 {facts}")
    site.program("squeue", "exit 0")
    site.program("sbatch", f"echo $* >>{calls}; echo 8")
    earlier(run, slurm=True, job_id="7")
    lost_script.bring_back(run, mine(run).number)
    assert calls.exists() is asked
    found = mine(run)
    assert (found.cause, found.action, found.successor) == ending


@pytest.mark.usefixtures("in_slurm")
def test_a_job_that_slurm_requeues_may_use_nodes_that_its_script_excludes(
    site: Site, run: RunDir
) -> None:
    write_json(run.job, (read_json(run.job) or {}) | {"left_out": {"n7": 5.0}})
    calls = site.folder / "calls"
    site.program("scontrol", f"echo $* >>{calls}; echo JobId=7 JobState=PENDING Restarts=1")
    earlier(run, slurm=True, job_id="7", cause="preempted", action=decision.LEFT)
    lost_script.bring_back(run, mine(run).number)
    update = f"update JobId=7 StartTime=now+{requeue.SETTLE} ExcNodeList="
    assert update in calls.read_text().splitlines()


@pytest.mark.usefixtures("in_slurm")
def test_a_wait_that_another_process_has_shortened_stays_so(site: Site, run: RunDir) -> None:
    calls = site.folder / "calls"
    soon = int(time.time()) + requeue.SETTLE
    said = f"JobId=7 JobState=PENDING Restarts=1 EligibleTime={soon}"
    site.program("scontrol", f"case $1 in update) echo $* >>{calls} ;; *) echo {said} ;; esac")
    earlier(run, slurm=True, job_id="7")
    now = mine(run)
    now.exclude = "n7"
    requeue.release(now)
    assert calls.read_text() == "update JobId=7 ExcNodeList=n7\n"


@pytest.mark.usefixtures("in_slurm")
def test_another_nodes_attempt_with_an_end_is_left_to_its_own_sentry(
    site: Site, run: RunDir
) -> None:
    site.program("scontrol", f"touch {site.folder}/calls; echo JobId=7 {KILLED}")
    earlier(run, slurm=True, job_id="7", host="elsewhere", cause="crash", action="requeue")
    lost_script.bring_back(run, mine(run).number)
    assert not (site.folder / "calls").exists()


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("cause", "want", "mode", "restarts", "follows"),
    [
        (decision.KILLED, "", "REQUEUE", 0, True),
        (decision.KILLED, "stop", "REQUEUE", 0, False),  # a person has asked for the end
        (decision.TIMEOUT, "", "REQUEUE", 0, True),
        (decision.PREEMPTED, "", "REQUEUE", 0, True),
        (decision.PREEMPTED, "", "REQUEUE", 1, False),  # Slurm has queued it again itself
        (decision.PREEMPTED, "", "CANCEL", 1, True),  # there it never does
        (decision.NODE, "", "CANCEL", 1, False),
        (decision.CANCELLED, "", "REQUEUE", 0, False),
    ],
)
def test_who_is_followed(
    site: Site, run: RunDir, cause: str, want: str, mode: str, restarts: int, follows: bool
) -> None:
    site.program("scontrol", f"echo JobId=7 JobState=COMPLETING Restarts={restarts}")
    earlier(run, slurm=True, job_id="7", site={"preempt_mode": mode})
    if want:
        write_json(run.request, {"want": want, "job_id": "7"})
    assert lost_script.would_follow(run, mine(run), cause) is follows


class Headless:
    """A job on spare nodes, and a Slurm that tells the state of its script's node n1.

    Args:
        state: of that node.
        refused: what Slurm says to a requeue.
        looks: times that the job is shown as running, if nobody ends it.
        nodes: the job's.
        ends: its state then.
        takes: whether Slurm changes what a follow-up waits for.
    """

    def __init__(
        self, site: Site, run: RunDir, state: str, refused: str, looks: int = 9,
        nodes: str = "n[1-2]", ends: str = "CANCELLED", takes: bool = True,
    ) -> None:  # fmt: skip
        job = read_json(run.job) or {}
        spec = {**job["spec"], "spares": 1, "requeue": {"here": True}}
        write_json(run.job, {**job, "launcher": "fork", "spec": spec})
        self._calls, over = site.folder / "calls", site.folder / "over"
        counted = site.folder / "looks"
        site.program(
            "scontrol",
            f"""
case "$*" in
  *"show node n1"*) echo NodeName=n1 State={state} ;;
  requeue*) echo requeue >>{self._calls}
     if [ "{refused}" ]; then echo "{refused}" >&2; exit 1; fi; : >{over} ;;
  update*dependency*) echo $3 >>{self._calls}; exit {int(not takes)} ;;
  *) state=RUNNING nodes={nodes}; printf . >>{counted}; read -r looks <{counted}
     if [ -e {over} ] || [ "${{#looks}}" -gt {looks} ]; then state={ends}; fi
     echo JobId=7 JobState=$state Restarts=0 ExitCode=0:0 ReqNodeList=n1 NodeList=$nodes ;;
esac
""",
        )
        site.program("squeue", "exit 0")
        site.program("sbatch", f"echo sbatch >>{self._calls}; echo 8")
        site.program("scancel", f"echo scancel >>{self._calls}; : >{over}")
        self._run = run

    def ended(
        self, learned: dict[str, Any] | None = None, **attempt: Any
    ) -> tuple[list[str], tuple[str | None, str, str]]:
        """What another node asks of Slurm, and how the attempt has ended then.

        Args:
            learned: facts of the site that the start did not get, but the sentry.
        """
        facts = {"job_id": "7", "host": "n1.site.org", "node": "n1"} | attempt
        earlier(self._run, slurm=True, **facts)
        if learned:
            write_json(self._run.attempt(mine(self._run).number).slurm, {"site": learned})
        lost_script.bring_back(self._run, mine(self._run).number, 2)
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        now = mine(self._run)
        return calls, (now.cause, now.action, now.successor)


NOT_ENDED = (None, "", "")
CGROUP = {"tracking": "cgroup", "hold": 121}


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("state", "refused", "wanted", "ends"),
    [
        ("DOWN*", "", ["requeue"], NOT_ENDED),
        ("IDLE*+NOT_RESPONDING", "", [], NOT_ENDED),  # it answers late
        (
            "DOWN*",
            "Access denied",
            ["requeue", "sbatch", "scancel"],
            ("node failure", "follow-up", "8"),
        ),
    ],
    ids=["down", "late", "refused"],
)
def test_a_job_without_its_scripts_node_is_brought_back(
    site: Site, run: RunDir, state: str, refused: str, wanted: list[str],
    ends: tuple[str | None, str, str],
) -> None:  # fmt: skip
    """By another node of it, whatever ``uname`` says there: Slurm's names count."""
    assert Headless(site, run, state, refused, 4 if not wanted else 9).ended() == (wanted, ends)


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("job", "wanted", "ends"),
    [
        ("7", ["sbatch", "scancel"], ("node failure", "follow-up", "8")),
        ("7_1", ["requeue"], NOT_ENDED),  # a follow-up would leave its array
    ],
)
def test_a_job_that_slurm_would_hold_is_followed_at_once(
    site: Site, run: RunDir, job: str, wanted: list[str], ends: tuple[str | None, str, str]
) -> None:
    """Where Slurm tracks processes by cgroup, none lives on to end that wait."""
    assert Headless(site, run, "DOWN*", "").ended(job_id=job, site=CGROUP) == (wanted, ends)


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("end", "wanted", "ends"),
    [
        # The node was lost before the script began the next attempt.
        ({"action": "here"}, ["sbatch", "scancel"], ("node failure", "follow-up", "8")),
        ({"action": "requeue"}, ["requeue"], ("crash", "requeue", "")),
        # That one would wait for a good end of this job.
        ({"action": "requeue", "successor": "9"}, ["requeue"], ("crash", "requeue", "9")),
    ],
    ids=["in place", "requeue", "waits"],
)
def test_a_held_job_whose_script_had_decided_is_brought_back(
    site: Site, run: RunDir, end: dict[str, str], wanted: list[str],
    ends: tuple[str | None, str, str],
) -> None:  # fmt: skip
    job = Headless(site, run, "DOWN*", "")
    assert job.ended(cause="crash", site=CGROUP, **end) == (wanted, ends)


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(("looks", "wanted"), [(2, []), (3, []), (4, ["sbatch"])])
def test_what_a_person_ends_meanwhile_is_not_noted_to_continue(
    site: Site, run: RunDir, looks: int, wanted: list[str]
) -> None:
    """A follow-up that was submitted by then sees the cancel itself."""
    assert Headless(site, run, "DOWN*", "", looks).ended(site=CGROUP) == (wanted, NOT_ENDED)


@pytest.mark.usefixtures("in_slurm")
def test_what_the_sentry_has_learned_of_the_site_counts(site: Site, run: RunDir) -> None:
    job = Headless(site, run, "DOWN*", "")
    assert job.ended(CGROUP)[0] == ["sbatch", "scancel"]


@pytest.mark.usefixtures("in_slurm")
def test_it_waits_in_the_queue_where_slurm_takes_no_follow_up(site: Site, run: RunDir) -> None:
    job = Headless(site, run, "DOWN*", "")
    site.program("sbatch", "echo no >&2; exit 1")
    ended = job.ended(site=CGROUP)
    assert ended == (["requeue"], NOT_ENDED)


@pytest.mark.usefixtures("in_slurm")
def test_a_job_whose_scripts_node_is_back_without_it_is_brought_back(
    site: Site, run: RunDir
) -> None:
    """Slurm had it down only for a moment, and has taken it out of the job."""
    job = Headless(site, run, "IDLE", "", nodes="n[2-3]")
    assert job.ended() == (["requeue"], NOT_ENDED)


@pytest.mark.usefixtures("in_slurm")
def test_a_job_that_a_person_ends_meanwhile_is_not_followed(site: Site, run: RunDir) -> None:
    """Slurm then refuses the requeue."""
    job = Headless(site, run, "DOWN*", "already completing", looks=4)
    assert job.ended() == (["requeue"], NOT_ENDED)


@pytest.mark.usefixtures("in_slurm")
def test_a_job_that_is_to_stop_is_ended_without_its_scripts_node(site: Site, run: RunDir) -> None:
    write_json(run.request, {"want": "stop", "job_id": "7"})
    assert Headless(site, run, "DOWN*", "").ended()[0] == ["scancel"]


@pytest.mark.usefixtures("in_slurm")
def test_a_follow_up_does_not_wait_for_a_job_that_nobody_could_end(site: Site, run: RunDir) -> None:
    end = {"cause": decision.NODE, "action": decision.FOLLOW, "successor": "8"}
    assert Headless(site, run, "DOWN*", "").ended(**end)[0] == ["scancel"]


@pytest.mark.usefixtures("in_slurm")
def test_a_refused_follow_up_is_the_end(site: Site, run: RunDir) -> None:
    job = Headless(site, run, "DOWN*", "Access denied")
    site.program("sbatch", "echo no >&2; exit 1")
    assert job.ended()[1] == ("node failure", "none", "")


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize("action", ["here", "requeue"])
def test_a_refused_restart_is_the_end(site: Site, run: RunDir, action: str) -> None:
    """Slurm shows the job as cancelled then, as if a person had done that."""
    job = Headless(site, run, "DOWN*", "Access denied")
    site.program("sbatch", "echo no >&2; exit 1")
    assert job.ended(cause="crash", action=action)[1] == ("node failure", "none", "")


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED"])
def test_a_job_that_slurm_ends_after_the_loss_of_its_scripts_node_is_followed(
    site: Site, run: RunDir, state: str
) -> None:
    """Before it had that node down."""
    job = Headless(site, run, "IDLE*+NOT_RESPONDING", "", looks=3, ends=state)
    cause = {row.job_state: name for name, row in decision.CAUSES.items()}[state]
    wanted = (["sbatch"], (cause, "follow-up", "8"))
    assert job.ended(site={"preempt_mode": "CANCEL"}) == wanted


@pytest.mark.usefixtures("in_slurm")
def test_a_second_follow_up_that_slurm_refuses_does_not_undo_the_first(
    site: Site, run: RunDir
) -> None:
    """Two nodes act at once, and a user may have one more job."""
    words = f"8|PENDING|Dependency|0|0||{run.script} 1 look|toy-1"
    came = site.folder / "came"
    site.program("scontrol", f"echo JobId=7 {KILLED}")
    site.program("squeue", f"[ ! -e {came} ] || echo '{words}'")
    site.program("sbatch", f": >{came}; echo too many jobs >&2; exit 1")
    earlier(run, slurm=True, job_id="7", host="elsewhere")
    lost_script.bring_back(run, mine(run).number, 2)
    found = mine(run)
    assert (found.cause, found.action, found.successor) == (decision.KILLED, "follow-up", "8")


@pytest.mark.usefixtures("in_slurm")
def test_what_another_node_has_recorded_meanwhile_stays(site: Site, run: RunDir) -> None:
    """Its follow-up is no longer in the queue, as it starts."""
    earlier(run, slurm=True, job_id="7", host="elsewhere")
    record = run.attempt(1).facts
    facts = read_json(record) or {}
    end = {"cause": decision.KILLED, "action": decision.FOLLOW, "successor": "8", "ended": 5.0}
    (site.folder / "recorded").write_text(json.dumps(facts | end))
    site.program("scontrol", f"echo JobId=7 {KILLED}")
    site.program("squeue", "exit 0")
    site.program("sbatch", f"/bin/cp {site.folder}/recorded {record}; exit 1")
    lost_script.bring_back(run, mine(run).number, 2)
    assert read_json(record) == facts | end


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("takes", "more", "follows"), [(True, [], "9"), (False, ["sbatch"], "8")], ids=["waits", "gone"]
)
def test_a_follow_up_of_the_script_no_longer_waits_for_its_good_end(
    site: Site, run: RunDir, takes: bool, more: list[str], follows: str
) -> None:
    """Slurm would drop it at the cancel of the job."""
    job = Headless(site, run, "DOWN*", "Access denied", takes=takes)
    ended = job.ended(cause="crash", action="requeue", successor="9")
    calls = ["requeue", "dependency=afterany:7", *more, "scancel"]
    assert ended == (calls, ("node failure", "follow-up", follows))
