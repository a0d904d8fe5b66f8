"""How a run is queued again: without bad nodes, and once."""

import time

import pytest
from lives import MISTAKE, attempted, earlier, failing
from sites import Site

from hpcddp import record
from hpcddp.attempt import decision, host, ledger, requeue
from hpcddp.attempt.decision import Decision
from hpcddp.attempt.nodes import bad_nodes
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.slurm.rules import Site as Rules


def test_nodes_are_left_out_only_while_enough_remain(site: Site) -> None:
    run, _ = failing(site, requeue={"exclude_bad_nodes": True})
    job = record.read(run)
    site.program("sinfo", "echo 'n[1-3]|idle'; echo 'n4|drained*'")
    for number, name in ((1, "n3"), (2, "n1")):
        if number > 1:
            attempted(run, number)
        write_json(run.attempt(number).error, MISTAKE | {"kind": "crash", "host": name})
    assert bad_nodes.excluded(run, job) == "n1"  # the newest; without n3 too two are too few
    job.nodes = [1, 2]
    assert bad_nodes.excluded(run, job) == "n1,n3"
    job.nodes = [3, 3]
    assert bad_nodes.excluded(run, job) is None
    site.program("sinfo", "exit 1")
    job.nodes = [1, 1]
    assert bad_nodes.excluded(run, job) is None


def test_a_node_is_used_again_where_too_few_others_suit_the_job(site: Site) -> None:
    """What Slurm refuses in any case is no reason to."""
    run, _ = failing(site, requeue={"exclude_bad_nodes": True})
    job = record.read(run)
    site.program("sinfo", "echo 'n[1-9]|idle'")
    write_json(run.attempt(1).error, MISTAKE | {"kind": "crash", "host": "n3"})
    for program, left_out in (
        ("exit 0", "n3"),
        ("[[ $* != *exclude=n3* ]]", None),
        ("exit 1", "n3"),
    ):
        site.program("sbatch", program)
        assert bad_nodes.excluded(run, job) == left_out


def test_a_node_without_its_gpu_is_left_out_unasked(site: Site) -> None:
    run, _ = failing(site)
    site.program("sinfo", "echo 'n[1-3]|idle'")
    write_json(run.attempt(1).error, MISTAKE | {"kind": "crash", "host": "n2"})
    assert bad_nodes.excluded(run, record.read(run)) is None
    found = MISTAKE | {"kind": "crash", "host": "n2", "bad_host": True}
    write_json(run.attempt(1).error, found)
    assert bad_nodes.excluded(run, record.read(run)) == "n2"


def test_of_a_range_of_nodes_so_many_are_spared_that_the_fewest_remain(site: Site) -> None:
    run, _ = failing(site)
    site.program("sinfo", "echo 'n[1-4]|idle'")
    job = record.read(run)
    for nodes, kept in (([2, 4], ["n2", "n3"]), ([3, 4], ["n2"]), ([4, 4], [])):
        job.nodes = nodes
        assert bad_nodes.spared(run, ["n2", "n3"], job) == kept


def test_a_node_is_left_out_no_longer_than_new_jobs_avoid_it(site: Site) -> None:
    run, _ = failing(site, slurm={"exclude": "n9"})
    job = record.read(run)
    job.left_out = {"n7": 5.0, "n8": time.time() + 60}
    record.write(run, job)
    assert bad_nodes.excluded(run, record.read(run)) == "n9,n8"
    found = MISTAKE | {"kind": "crash", "host": "n2", "bad_host": True}
    write_json(run.attempt(1).error, found)
    site.program("sinfo", "echo 'n[1-9]|idle'")
    assert bad_nodes.excluded(run, record.read(run)) == "n9,n8,n2"


def test_after_progress_a_requeued_job_may_use_all_nodes_again(site: Site) -> None:
    """Slurm keeps the nodes that it was to leave out for the attempt before, also where that was
    another job."""
    run, _ = failing(site, slurm={"exclude": "n9"})
    attempted(run, 2)
    for number in (1, 2):
        now = ledger.read(run.attempt(number))
        assert now
        now.job_id, now.exclude, now.gained = "7", "n9,n2" if number == 1 else None, number == 2
        requeue.note(run, now)
    assert bad_nodes.excluded(run, record.read(run)) == "n9"
    now.job_id = "8"  # a follow-up: the script says which
    requeue.note(run, now)
    assert bad_nodes.excluded(run, record.read(run)) is None
    before = ledger.read(run.attempt(1))
    assert before
    before.successor = "8"  # it was submitted without n2
    requeue.note(run, before)
    assert bad_nodes.excluded(run, record.read(run)) == "n9"


def test_a_node_that_is_lost_takes_the_place_of_none_that_is_left_out(site: Site) -> None:
    """Slurm may still take it for well."""
    run, _ = failing(site, spares=1)
    job = record.read(run)
    site.program("sinfo", "echo 'n[1-5]|idle'")
    job.nodes = [3, 3]
    assert bad_nodes.spared(run, ["n2"], job) == ["n2"]
    now = ledger.read(run.attempt(1))
    assert now
    now.nodes = "n[1-4]"
    requeue.note(run, now)
    write_json(run.attempt(1).failed, {"time": 1.0, "usable": ["n1", "n2", "n3"]})
    assert bad_nodes.spared(run, ["n2"], job) == []


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("left_out", "asked"),
    [
        ({"n7": 5.0}, "update JobId=8 StartTime=now ExcNodeList="),
        ({"n7": 5.0, "n8": 1e11}, "--exclude=n8"),
        ({"n8": 1e11}, ""),
        (["n7"], ""),  # an older version recorded no time
    ],
)
def test_a_follow_up_may_use_nodes_that_its_script_excludes(
    site: Site, run: RunDir, left_out: object, asked: str
) -> None:
    write_json(run.job, (read_json(run.job) or {}) | {"left_out": left_out})
    site.program("squeue", "exit 0")
    site.program("scontrol", f"echo $* >>{site.folder}/asked")
    site.program("sbatch", f"echo $* | grep -o -e '--exclude=[^ ]*' >>{site.folder}/asked; echo 8")
    earlier(run, slurm=True, job_id="7")
    mine, verdict = ledger.last(run), Decision("preempted", decision.FOLLOW)
    assert mine and requeue.bring_back(run, mine, verdict, record.read(run)) == "0"
    assert (site.folder / "asked").read_text().strip() == asked


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("cause", "asked"),
    [
        ("preempted", ["--dependency=afterany:7", "update JobId=7 Requeue=0"]),
        ("crash", ["--dependency=afterok:7"]),
    ],
)
def test_a_preempted_job_is_not_requeued_beside_its_follow_up(
    site: Site, run: RunDir, cause: str, asked: list[str]
) -> None:
    """Since Slurm 24.11 it would be, and its follow-up would wait for it."""
    site.program("squeue", "exit 0")
    site.program("scontrol", f"echo $* >>{site.folder}/asked")
    site.program("sbatch", f"echo $* | grep -o 'dependency=[^ ]*' >>{site.folder}/asked; echo 8")
    earlier(run, slurm=True, job_id="7")
    mine = ledger.last(run)
    assert mine
    mine.site = Rules(tracking="cgroup")._asdict()
    verdict = Decision(cause, decision.AGAIN)
    assert requeue.bring_back(run, mine, verdict, record.read(run)) == "0"
    lines = (site.folder / "asked").read_text().splitlines()
    assert [f"--{line}" if "=after" in line else line for line in lines] == asked


@pytest.mark.usefixtures("in_slurm")
@pytest.mark.parametrize(
    ("resized", "accounts", "asked"),
    [("ResizeTime=5", 1, "sbatch"), ("ResizeTime=5", 0, "requeue"), ("", 1, "requeue")],
)
def test_a_job_that_slurm_lets_nobody_change_is_followed(
    site: Site, run: RunDir, resized: str, accounts: int, asked: str
) -> None:
    """It has lost a node, and Slurm keeps no accounts."""
    site.program(
        "scontrol",
        f"""
case "$*" in
  *update*) exit {accounts} ;;
  requeue*) echo requeue >>{site.folder}/asked ;;
  *) echo JobState=RUNNING Restarts=0 {resized} ;;
esac
""",
    )
    site.program("squeue", "exit 0")
    site.program("sbatch", f"echo sbatch >>{site.folder}/asked; echo 8")
    job = read_json(run.job) or {}
    spec = {**job["spec"], "spares": 1, "requeue": {"here": True}}
    write_json(run.job, {**job, "launcher": "fork", "spec": spec})
    earlier(run, slurm=True, job_id="7")
    mine, verdict = ledger.last(run), Decision("lost node", decision.AGAIN)
    assert mine
    mine.site = Rules(tracking="linuxproc")._asdict()
    assert requeue.bring_back(run, mine, verdict, record.read(run)) == "0"
    assert (site.folder / "asked").read_text().split() == [asked]


@pytest.mark.usefixtures("in_slurm")
def test_a_preempted_run_waits_for_a_slow_slurm(site: Site, run: RunDir) -> None:
    """A requeue in place of its follow-up would cost two minutes."""
    site.program("squeue", "sleep 4")  # longer than this site gives a job that it ends
    site.program("scontrol", "exit 0")
    site.program("sbatch", "echo 8")
    earlier(run, slurm=True, job_id="7")
    mine, verdict = ledger.last(run), Decision("preempted", decision.AGAIN)
    assert mine
    mine.site = Rules(tracking="cgroup", grace=1, kill_wait=1)._asdict()
    assert requeue.patience(mine, ends=True) < 4
    assert requeue.bring_back(run, mine, verdict, record.read(run)) == "0"
    assert mine.successor == "8"


@pytest.mark.usefixtures("in_slurm")
def test_what_ends_the_job_after_the_decision_is_heard_before_a_restart_in_place(
    run: RunDir,
) -> None:
    words = run.path / "said"
    words.write_text("old\n")
    earlier(run, slurm=True, job_id="7", said=str(words), said_size=0)
    mine, verdict = ledger.last(run), Decision("crash", decision.HERE)
    assert mine

    def follows() -> str:
        return requeue.bring_back(run, mine, verdict, record.read(run))

    write_json(run.request, {"want": "preempt", "job_id": "7"})
    assert follows() == ""
    run.request.unlink()
    with words.open("a") as log:
        log.write("error: *** JOB 7 ON n1 CANCELLED AT x DUE TO NODE FAILURE ***\n")
    assert (follows(), mine.said_size) == ("", 0)
    words.write_text("none of it\n")
    assert (follows(), mine.said_size) == (decision.HERE, len("none of it\n"))


@pytest.mark.usefixtures("in_slurm")
def test_what_the_sentry_submitted_goes_where_nothing_follows(site: Site, run: RunDir) -> None:
    """Slurm's words were of a preemption, and a person had asked for the end."""
    words = site.folder / "said"
    words.touch()
    site.program("scontrol", "echo JobState=COMPLETING Restarts=0")
    site.program("scancel", f"echo $* >>{site.folder}/asked")
    rows = [f"{number}|PENDING|None|x|x||{run.script} {of} look|{run.name}"
            for number, of in ((8, 1), (9, 2))]  # fmt: skip
    site.program("squeue", f"printf '%s\\n' '{rows[0]}' '{rows[1]}'")
    earlier(run, slurm=True, job_id="7", said=str(words))
    write_json(run.request, {"want": "stop", "job_id": "7"})
    words.write_text("error: *** JOB 7 ON n1 CANCELLED AT x DUE TO PREEMPTION ***\n")
    assert host.main(["end", str(run.path), "1", "85"]) == 0
    assert (site.folder / "asked").read_text() == "--state=PENDING 8\n"
