"""Two lives of one run: the newest attempt alone writes."""

import errno
import json
import shutil
import signal

import pytest
from ranks import CALM, Ranks, begin, make_run, one_rank, records, steps, wait_for

from hpcddp.errors import LeaseLost
from hpcddp.rundir import RunDir, read_lines
from hpcddp.train.checkpoint import checkpoint, publish

SLOW = """
import time
_loss = loss
def loss(output, target):
    time.sleep(0.01)
    return _loss(output, target)
"""


def published(run):
    """(step, attempt) of each checkpoint."""
    folders = checkpoint.complete(run.checkpoints)
    metas = [json.loads((folder / "meta.json").read_text()) for folder in folders]
    return {(meta["step"], meta["attempt"]) for meta in metas}


def test_of_two_lives_at_once_the_older_publishes_nothing_and_leaves(tmp_path):
    run = make_run(tmp_path, gpus=2, extra=SLOW, max_steps=10**6, checkpoint__every=2,
                   checkpoint__keep=10**6)  # fmt: skip
    assert begin(run) == 1
    with Ranks.of(run, 2) as old:
        wait_for(lambda: steps(run), "a checkpoint")
        assert begin(run) == 2
        before = published(run)
        with Ranks.of(run, 2, attempt=2) as new:
            ends = old.wait()
            assert [code for code, _, _ in ends] == [88, 88]
            assert all("is superseded: a newer attempt owns this run" in err for _, _, err in ends)
            size = run.attempt(1).metrics.stat().st_size
            wait_for(lambda: any(n == 2 for _, n in published(run)), "a checkpoint of the second")
            new.processes[0].send_signal(signal.SIGTERM)
            assert [code for code, _, _ in new.wait()] == [85, 85]
    assert {file for file in published(run) if file[1] == 1} <= before
    assert run.attempt(1).metrics.stat().st_size == size
    assert not run.attempt(1).error.exists() and not run.attempt(2).error.exists()
    assert records(run, "end", 1) == [] and len(records(run, "end", 2)) == 1
    assert not list(run.checkpoints.glob(".*"))


def test_a_life_that_starts_after_its_successor_does_nothing(tmp_path):
    run = make_run(tmp_path)
    assert [begin(run), begin(run)] == [1, 2]
    with pytest.raises(LeaseLost):
        one_rank(run, 1)
    assert list(read_lines(run.attempt(1).metrics)) == []
    assert list(run.checkpoints.iterdir()) == []


def test_a_save_after_the_fence_publishes_nothing(tmp_path):
    """The newer life comes between two looks of the loop; the next thing is a save."""
    run = make_run(tmp_path, max_steps=10, checkpoint__every=4)

    def events(record):
        if record["event"] == "checkpoint" and record["step"] == 4:
            begin(run)

    with pytest.raises(LeaseLost):
        one_rank(run, on_record=events)
    assert published(run) == {(4, 1)} and records(run, "end") == []
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-4"]


def test_a_disk_that_is_away_is_no_newer_attempt(tmp_path):
    """Another file system is in its place: an empty one, as where nothing is mounted."""
    run = make_run(tmp_path, max_steps=12, checkpoint__every=4, checkpoint__keep=9, **CALM)
    away = tmp_path / "away"

    def events(record):
        if record["event"] == "checkpoint" and record["step"] == 4:
            run.path.rename(away)
            run.path.mkdir()
        if record["event"] == "checkpoint_failed":
            shutil.rmtree(run.path)
            away.rename(run.path)

    assert one_rank(run, on_record=events) == "done"
    assert [r["step"] for r in records(run, "checkpoint_failed")] == [8]
    assert steps(run) == [12, 4]


def test_a_file_system_that_is_away_for_a_moment_costs_one_save(tmp_path, monkeypatch):
    run = make_run(tmp_path, max_steps=12, checkpoint__every=4, checkpoint__keep=9, **CALM)

    def away(*arguments):
        raise OSError(errno.ESTALE, "Stale file handle")

    def events(record):
        if record["event"] == "checkpoint" and record["step"] == 4:
            monkeypatch.setattr(RunDir, "outlived", away)
            monkeypatch.setattr(publish, "empty", away)
        if record["event"] == "checkpoint_failed":
            monkeypatch.undo()

    assert one_rank(run, on_record=events) == "done"
    (failed,) = records(run, "checkpoint_failed")
    assert failed["step"] == 8 and "Stale file handle" in failed["reason"]
    assert steps(run) == [12, 4]
