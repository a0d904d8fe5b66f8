"""Checkpoints that cannot be read for a while, by a rank that may not: root may read everything."""

import json
import sys

import pytest
from ranks import AS_A_USER, WORKER, Ranks, make_run, one_rank, records, steps

from hpcddp.topology import Rank

FIND = """
import os, sys
from hpcddp import record
from hpcddp.attempt import error_record
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank
from hpcddp.train.checkpoint import newest
from hpcddp.train.job import join
from hpcddp.train.checkpoint.disk_retry import DiskRetry

run, rank = RunDir(sys.argv[1]), Rank.from_env(os.environ)
looks = []
world = join(rank, record.read(run), os.environ)
world.connect()
try:
    newest.find(run, DiskRetry(world, lambda: looks.append(1), seconds=0.5, pause=0.1))
except Exception as error:
    print(error_record.report(error, run.attempt(2), rank.world_rank, stepped=False), len(looks))
"""


@pytest.fixture
def run(tmp_path):
    """Steps 4 and 6 are saved, and two ranks are to go on."""
    made = make_run(tmp_path, max_steps=6, checkpoint__every=4)
    one_rank(made)
    job = json.loads(made.job.read_text()) | {"gpus_per_node": 2}
    job["spec"]["max_steps"] = 8
    made.job.write_text(json.dumps(job))
    return made


def ranks_of(run, attempt, words):
    environs = [Rank(number, 2, number, 2, 0).to_env() for number in range(2)]
    return Ranks(run, environs, attempt=attempt, words=[*AS_A_USER, *words])


def test_what_cannot_be_read_for_a_moment_is_read_again_by_all(run):
    marks = list(run.checkpoints.glob("*/COMPLETE"))
    for mark in marks:
        mark.chmod(0)
    with ranks_of(run, 2, WORKER) as ranks:
        said = iter(ranks.processes[0].stdout.readline, "")
        told = next(line for line in said if "all ranks retry" in line)
        for mark in marks:
            mark.chmod(0o644)
        ends = ranks.wait()
        assert [code for code, _, _ in ends] == [0, 0], ends
    assert "rank 0 on " in told and "step-6/COMPLETE: Permission denied" in told
    assert not any("all ranks retry" in out for _, out, _ in ends)  # it is printed once
    assert [r["resumed"] for r in records(run, "start", 2)] == ["checkpoints/step-6"]
    assert steps(run) == [8, 6]


def test_what_is_unreadable_for_long_is_a_crash_of_the_rank_that_could_not(run):
    """Rank 1 looks at every other file; nothing is changed."""
    before = sorted(run.checkpoints.rglob("*"))
    data = run.checkpoints / "step-6" / "__0_0.distcp"
    data.chmod(0)
    with ranks_of(run, 2, [sys.executable, "-c", FIND]) as ranks:
        ends = ranks.wait()
    first = json.loads(run.attempt(2).error.read_text())
    assert (first["rank"], first["kind"], first["type"]) == (1, "crash", "CheckpointUnreadable")
    assert f"{data}: rank 1 on " in first["message"]
    assert "Permission denied" in first["message"]
    assert [(code, err) for code, _, err in ends] == [(0, ""), (0, "")]
    assert all(1 < int(out.split()[-1]) <= 5 for _, out, _ in ends)  # looks, of both together
    assert sorted(run.checkpoints.rglob("*")) == before


def test_a_run_whose_disk_is_away_does_not_begin_anew(tmp_path):
    """Its folder is there, and empty: as where a file system is not mounted yet."""
    run = make_run(tmp_path, max_steps=2)
    one_rank(run)
    run.job.rename(tmp_path / "job.json")
    run.checkpoints.rename(tmp_path / "checkpoints")
    with Ranks(run, [Rank(0, 1, 0, 1, 0).to_env()], words=[sys.executable, "-c", AWAY]) as ranks:
        ((code, out, err),) = ranks.wait()
    assert (code, err) == (0, "") and "job.json: rank 0 on " in out


AWAY = FIND.replace("record.read(run)", "record.JobRecord('', {}, [1, 1], 1, 'local', '')")
