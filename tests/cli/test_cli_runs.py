"""Commands that look at runs, and ask things of them."""

import json
from collections.abc import Callable

import pytest
from sites import Outcome, Site, record_run

from hpcddp.attempt import decision, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir, write_json
from hpcddp.submit import times

Command = Callable[..., Outcome]

STOP = "--state=PENDING 7\n--state=RUNNING --signal=USR2 7\n"


def test_lists_of_nothing(site: Site, hpcddp: Command) -> None:
    done = hpcddp("ls", "--json")
    assert (done.code, json.loads(done.out)) == (0, {"schema_version": 1, "runs": []})
    assert hpcddp("ls").err.startswith(f"no runs in {site.runs}\n")
    for arguments in (["status"], ["logs"], ["cancel", "x"], ["stop", "x"],
                      ["resume", "last"], ["export", "last", "model.pt"]):  # fmt: skip
        done = hpcddp(*arguments)
        assert (done.code, done.out) == (2, "")
        assert "no runs yet" in done.err
    assert not site.runs.exists()


def test_runs_are_found_by_what_people_type(site: Site, hpcddp: Command) -> None:
    site.slurm(sacct="exit 0")
    for name in ("alpha", "beta", "bet"):
        assert hpcddp("submit", "-J", name).code == 0
    names = {run.name.split("-")[0]: run.name for run in site.runs.iterdir()}
    listed = json.loads(hpcddp("ls", "--json").out)["runs"]
    assert [row["run"] for row in listed] == [names[n] for n in ("bet", "beta", "alpha")]
    for token, name in {"last": "bet", "a": "alpha", names["beta"]: "beta", "beta": "beta"}.items():
        assert json.loads(hpcddp("status", token, "--json").out)["run"] == names[name]
    several = hpcddp("status", "b")
    assert several.code == 2 and names["beta"] in several.err and names["bet"] in several.err
    assert names["alpha"] not in several.err


def submitted(site: Site, job_id: str = "7") -> RunDir:
    run = RunDir(site.runs / "toy-1")
    run.create()
    record_run(run, (2, 2), poll_seconds=1)
    write_json(run.submission, {"job_id": job_id, "submitted": 10.0})
    return run


def test_a_waiting_job_and_a_slurm_that_is_gone(site: Site, hpcddp: Command) -> None:
    submitted(site)
    site.slurm(squeue="echo '7|PENDING|Resources|1893456000|1893459600|||toy-1'")
    done = hpcddp("status", "7")
    assert done.code == 0
    assert "state     PENDING\n" in done.out
    assert f"starts    {times.shown(1893459600)}, as Slurm expects\n" in done.out
    assert (
        "waits     Resources: the nodes that it needs are busy: wait, or ask for less" in done.out
    )
    site.slurm(squeue="echo 'squeue: error: Unable to contact slurm' >&2; exit 1")
    for command in (["status", "toy"], ["ls"]):
        done = hpcddp(*command)
        assert done.code == 3
        assert "PENDING" in done.out and "last known state" in done.err
        data = json.loads(hpcddp(*command, "--json").out)
        assert (data.get("runs") or [data])[0]["stale"] is True
    for asking in ("stop", "cancel", "resume"):
        assert hpcddp(asking, "toy").code == 3


def test_who_follows_a_waiting_run_reads_why_it_waits(site: Site, hpcddp: Command) -> None:
    submitted(site)
    once = "[ -e asked ] && exit; touch asked"
    pending = "echo '7|PENDING|PartitionConfig|x|x|||toy-1'"
    site.slurm(squeue=f"{once}; {pending}", sacct="echo '7|CANCELLED|0:0|x'")
    done = hpcddp("logs", "toy", "-f")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "note: toy-1 is PENDING: PartitionConfig: the partition can never run it as requested: use "
        "fewer --nodes or --gpus, or another partition (-p)\n"
    )


def test_a_damaged_run_is_listed_and_named(site: Site, hpcddp: Command) -> None:
    submitted(site).job.write_text('{"format": 1')
    done = hpcddp("ls")
    assert (done.code, done.out.splitlines()[1].split()[:2]) == (0, ["toy-1", "DAMAGED"])
    (row,) = json.loads(hpcddp("ls", "--json").out)["runs"]
    assert (row["run"], row["state"]) == ("toy-1", "DAMAGED")
    for arguments in (["status"], ["logs"], ["stop", "last"], ["resume", "last"]):
        done = hpcddp(*arguments)
        assert done.code == 2 and "toy-1/job.json" in done.err


def test_stop_and_cancel_say_what_was_asked(site: Site, hpcddp: Command) -> None:
    submitted(site)
    site.slurm(squeue="echo '7|RUNNING|None|x|x|n[1-2]||toy-1'")
    assert hpcddp("stop", "last").out == "stop requested for toy-1 (was RUNNING, job 7)\n"
    data = json.loads(hpcddp("cancel", "last", "--json").out)
    assert data == {
        "schema_version": 1, "run": "toy-1", "asked": "cancel", "state": "RUNNING", "job_id": "7",
    }  # fmt: skip
    assert (site.folder / "cancelled").read_text() == STOP + "7\n"


def logged(site: Site) -> RunDir:
    run = submitted(site)
    run.job_log("7").write_text("module: loaded\n")
    for number, text in enumerate(("0: one\n5: two\n", "5: three\n15: no\n 5: four \x1b[31m\n")):
        facts = Attempt(0, "7", "n1", 1, "1", True, "n[1-2]", 20.0 + number)
        ledger.begin(run, facts, lambda earlier: False)
        run.attempt(number + 1).log.write_text(text)
        ledger.end(run, number + 1, 0, decision.DONE)
    return run


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ([], ["module: loaded", "0: one", "5: two", "5: three", "15: no", " 5: four \x1b[31m"]),
        (["--rank", "5"], ["5: two", "5: three", " 5: four \x1b[31m"]),
        (["--attempt", "1"], ["0: one", "5: two"]),
        (["--attempt", "2", "--rank", "0"], []),
        (["-f", "--rank", "0"], ["0: one"]),
        (["-f", "--attempt", "1"], ["0: one", "5: two"]),
    ],
)
def test_logs(site: Site, command: Command, arguments: list[str], lines: list[str]) -> None:
    logged(site)
    done = command("logs", "last", *arguments)
    assert (done.code, done.out.splitlines()) == (0, lines)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--rank", "8"], "no rank 8\n  the run has 8 ranks, the first is 0"),
        (["--attempt", "3"], "no attempt 3\n  the run has 2 attempts"),
        (["-f", "--attempt", "3"], "no attempt 3"),
    ],
)
def test_logs_that_are_not_there(
    site: Site, hpcddp: Command, arguments: list[str], what: str
) -> None:
    logged(site)
    done = hpcddp("logs", "last", *arguments)
    assert (done.code, done.out) == (2, "") and what in done.err


def test_who_submits_reads_when_slurm_expects_to_start(site: Site, hpcddp: Command) -> None:
    row = 'echo "42|PENDING|Priority|1893456000|1893459600|||${name#*=}"'
    site.slurm(squeue=f"for name; do [[ $name == --name=* ]] && {row}; done; exit 0")
    done = hpcddp("submit", "toy")
    assert done.code == 0, done.text
    assert "note: Slurm expects to start it at 2030-01-01 " in done.err
