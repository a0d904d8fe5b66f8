"""How a checkpoint gets its name, and which ones are kept."""

import json
import os
import shutil

import pytest
from ranks import CALM, make_run, one_rank, steps

from hpcddp.errors import CheckpointError
from hpcddp.rundir import write_json
from hpcddp.train.checkpoint import checkpoint, damage, publish


def test_many_stops_in_a_row_leave_a_bounded_number_of_checkpoints(tmp_path):
    run = make_run(tmp_path, max_steps=10**6, **CALM)
    for stop in range(1, 21):
        write_json(run.request, {"want": "stop"})
        assert one_rank(run, stop) == "stopped"
        names = {p.name for p in run.checkpoints.iterdir()}
        assert f"step-{stop}" in names and len(names) <= 3
    assert steps(run)[:2] == [20, 19]


def names(run):
    return {p.name for p in run.checkpoints.iterdir()}


def flip(data):
    """Change a bit; the size stays."""
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_what_was_passed_over_stays_and_pushes_no_good_checkpoint_out(tmp_path):
    run = make_run(tmp_path, max_steps=6, checkpoint__every=1, checkpoint__keep=4, **CALM)
    one_rank(run)
    for step in (4, 6):
        flip(run.checkpoints / f"step-{step}" / "__0_0.distcp")
    (run.checkpoints / "step-5/COMPLETE").unlink()
    (run.checkpoints / "step-99").mkdir()
    job = json.loads(run.job.read_text())
    job["spec"]["checkpoint"] |= {"every": 0, "keep": 1}
    job["spec"]["max_steps"] = 10**6
    run.job.write_text(json.dumps(job))
    write_json(run.request, {"want": "stop"})
    assert one_rank(run, 2) == "stopped"  # after step 4, taken again
    assert names(run) == {"step-4", "step-5", "step-6", "step-99"}  # 3 is one more than is kept
    assert damage.of_content(run.checkpoints / "step-4") == ""
    assert damage.of_content(run.checkpoints / "step-6") != ""


@pytest.mark.parametrize("harm", ["cut", "unmark", "unreadable"])
def test_saves_remove_nothing_that_is_not_whole(tmp_path, harm):
    """What becomes of it is for a person to say."""
    run = make_run(tmp_path, max_steps=8, checkpoint__every=1, checkpoint__keep=2, **CALM)

    def events(record):
        if record["event"] == "checkpoint" and record["step"] == 3:
            mark = run.checkpoints / "step-2" / "COMPLETE"
            if harm == "cut":
                os.truncate(mark.with_name("__0_0.distcp"), 40)
            else:
                mark.unlink()
            if harm == "unreadable":
                mark.symlink_to(mark)  # ELOOP

    assert one_rank(run, on_record=events) == "done"
    assert names(run) == {"step-2", "step-7", "step-8"}


def test_a_save_that_cannot_be_read_back_has_failed_and_removes_nothing(two):
    target, aside = two
    before = (target / "meta.json").read_bytes()
    (aside / "meta.json").write_bytes(b"{}")  # as a server that lost what it had acknowledged
    with pytest.raises(
        CheckpointError, match=r"reading it back failed: meta.json has 2 of \d+ bytes"
    ):
        publish.publish(aside, target)
    publish.prune(target.parent, 1, None, set())
    assert (checkpoint.old(target) / "meta.json").read_bytes() == before
    assert checkpoint.complete(target.parent) == [checkpoint.old(target)]
    another = aside.with_name("another")
    shutil.copytree(checkpoint.old(target), another)
    publish.publish(another, target)  # what is not whole makes way, and stays all the same
    assert checkpoint.complete(target.parent) == [target]
    publish.prune(target.parent, 1, None, set())
    (damaged,) = target.parent.glob("damaged-step-2-*")
    assert (damaged / "meta.json").read_bytes() == b"{}" and damage.of_sizes(target) == ""


@pytest.fixture
def two(tmp_path):
    """A complete checkpoint of step 2 under its name, and another one of it aside."""
    runs = [make_run(tmp_path / name, max_steps=2, seed=seed) for seed, name in enumerate("ab")]
    for run in runs:
        one_rank(run)
    aside = runs[0].saving(1)
    aside.mkdir()
    (runs[1].checkpoints / "step-2").rename(aside / "step-2")
    return runs[0].checkpoints / "step-2", aside / "step-2"


def test_a_checkpoint_is_replaced_by_a_whole_one(two):
    target, aside = two
    new = (aside / "meta.json").read_bytes()
    publish.publish(aside, target)
    assert not checkpoint.old(target).exists()
    assert (target / "meta.json").read_bytes() == new and damage.of_content(target) == ""
    assert not aside.exists() and checkpoint.complete(target.parent) == [target]


def test_what_was_taken_away_replaces_nothing(two):
    target, aside = two
    before = (target / "meta.json").read_bytes()
    aside.parent.rename(aside.parent.with_name(".gone-1234"))
    with pytest.raises(FileNotFoundError):
        publish.publish(aside, target)
    assert (target / "meta.json").read_bytes() == before
    assert checkpoint.complete(target.parent) == [target]


def test_between_two_renames_the_old_one_is_found_and_not_tidied_away(two):
    target, _ = two
    target.rename(checkpoint.old(target))
    publish.tidy(target.parent)
    assert checkpoint.complete(target.parent) == [checkpoint.old(target)]
    assert checkpoint.step_of(checkpoint.old(target)) == 2
