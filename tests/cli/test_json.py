"""JSON for programs: one object for a result and for an error, with a schema version."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from sites import Outcome, Site, record_run

from hpcddp.rundir import RunDir, write_json

Command = Callable[..., Outcome]
AWAY = "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1"


def only_object(done: Outcome) -> dict[str, Any]:
    """The only object that a command printed."""
    (line,) = done.out.splitlines()
    data: dict[str, Any] = json.loads(line)
    assert data["schema_version"] == 1
    return data


def waiting(site: Site) -> RunDir:
    run = RunDir(site.runs / "toy-1")
    run.create()
    record_run(run, (2, 2), poll_seconds=1)
    write_json(run.submission, {"job_id": "7", "submitted": 10.0})
    return run


@pytest.mark.parametrize(
    ("arguments", "kind", "what", "where"),
    [
        (["submit", "tou", "--json"], "JobFileError", "unknown job 'tou'", "jobs"),
        (["config", "--set", "lr=1", "--json"], "JobFileError", "unknown key 'lr'", "--set"),
        (["status", "--json"], "RunError", "no runs yet", "runs"),
        (
            ["status", "--jsno", "--json"],
            "NoSuchOption",
            "no such option '--jsno'",
            "hpcddp status",
        ),
        (["stop", "--json"], "MissingParameter", "missing argument 'RUN'", "hpcddp stop"),
        (["logs", "--json"], "NoSuchOption", "no such option '--json'", "hpcddp logs"),
    ],
)
def test_an_error_is_one_object(
    site: Site, hpcddp: Command, arguments: list[str], kind: str, what: str, where: str
) -> None:
    done = hpcddp(*arguments)
    assert (done.code, done.err) == (2, "")
    error = only_object(done)["error"]
    assert error.keys() == {"kind", "what", "where", "hint", "exit_code"}
    assert (error["kind"], error["what"], error["exit_code"]) == (kind, what, 2)
    assert error["where"].endswith(where) and error["hint"]


def test_notes_do_not_stand_beside_the_json_of_an_error(site: Site, hpcddp: Command) -> None:
    site.slurm(sbatch="[ $1 = --version ] || { echo 'sbatch: error: no such qos' >&2; exit 1; }")
    (site.folder / "jobs" / "toy.toml").unlink()
    done = hpcddp("submit", "--json")
    assert (done.code, done.err) == (1, "")
    assert only_object(done)["error"]["kind"] == "SubmissionRefused"
    assert "note: " in hpcddp("submit").err


def test_the_json_option_of_a_program_is_its_own(site: Site, hpcddp: Command) -> None:
    done = hpcddp("submit", "--nodes", "0", "--", "bash", "--json")
    assert done.code == 2 and done.out == "" and done.err.startswith("error: --nodes: ")


def test_a_slurm_that_cannot_be_reached_is_an_object_with_exit_code_3(
    site: Site, hpcddp: Command
) -> None:
    waiting(site)
    site.slurm(squeue=AWAY)
    done = hpcddp("stop", "toy", "--json")
    assert (done.code, done.err) == (3, "")
    error = only_object(done)["error"]
    assert (error["kind"], error["exit_code"]) == ("SlurmUnreachable", 3)
    assert "Unable to contact slurm controller" in error["what"]


@pytest.mark.parametrize("command", ["status", "ls"])
def test_a_stale_state_is_reported_once(site: Site, hpcddp: Command, command: str) -> None:
    waiting(site)
    site.slurm(squeue=AWAY)
    done = hpcddp(command)
    assert done.code == 3
    assert done.text.count("Unable to contact") == 1 and done.err.startswith("warning: ")
    told = hpcddp(command, "--json")
    assert (told.code, told.err) == (3, "")
    data = only_object(told)
    (row,) = data.get("runs", [data])
    assert row["stale"] is True and "Unable to contact" in row["reason"]


def test_a_dry_run_is_one_object(site: Site, hpcddp: Command) -> None:
    site.slurm()
    asked = ("submit", "--nodes", "2", "--gpus", "2", "--strategy", "pp=2,ddp", "--dry-run")
    done = hpcddp(*asked, "--json")
    data = only_object(done)
    assert (done.code, done.err) == (0, "")
    assert data["script"].startswith("#!/bin/bash\n# Made by hpcddp ")
    assert data["verdict"] == {"accepted": True, "message": "Job 9 to start"}
    assert (data["nodes"], data["world_size"], data["strategy"]) == (2, 4, "pp=2,ddp=2")
    assert data["ranks"][3] == {
        "rank": 3, "node": 1, "host": None, "local_rank": 1, "pp": 1, "ddp": 1, "data": 1,
    }  # fmt: skip
    assert not site.runs.exists()


def test_the_verdict_of_a_dry_run_decides_its_exit_code(site: Site, hpcddp: Command) -> None:
    site.slurm(sbatch="[ $1 = --version ] || { echo 'sbatch: error: no such qos' >&2; exit 1; }")
    done = hpcddp("submit", "--dry-run", "--json")
    assert done.code == 1
    assert only_object(done)["verdict"] == {"accepted": False, "message": "no such qos"}
    local = hpcddp("submit", "--dry-run", "--json", "--cluster", "local")
    assert (local.code, only_object(local)["verdict"]) == (0, None)
    site.slurm(sbatch=f"[ $1 = --version ] || {{ {AWAY.replace('squeue', 'sbatch')}; }}")
    away = hpcddp("submit", "--dry-run", "--json")
    assert (away.code, away.err, only_object(away)["error"]["exit_code"]) == (3, "", 3)


def test_the_files_of_a_snapshot_are_one_object(site: Site, hpcddp: Command) -> None:
    site.slurm()
    site.write("train.sh", "true\n")
    done = hpcddp("submit", "--show-snapshot", "--json", "--", "bash", "train.sh")
    assert only_object(done)["files"]["train.sh"] == 5


def test_a_submission_has_a_schema_version(site: Site, hpcddp: Command) -> None:
    site.slurm()
    assert only_object(hpcddp("submit", "--json"))["job_id"] == "42"


def test_explained_keys_are_one_object(site: Site, hpcddp: Command) -> None:
    (key,) = only_object(hpcddp("config", "--explain", "train.lr", "--json"))["keys"]
    assert (key["of"], key["key"], key["default"], key["least"]) == ("job", "train.lr", 1e-3, 0)
