"""How a checkpoint gets its name, and which ones are kept."""

import json

import pytest
from ranks import CALM, make_run, one_rank, steps

from hpcddp.rundir import write_json
from hpcddp.train import checkpoint, publish


def test_many_stops_in_a_row_leave_a_bounded_number_of_checkpoints(tmp_path):
    run = make_run(tmp_path, max_steps=10**6, **CALM)
    for stop in range(1, 21):
        write_json(run.request, {"want": "stop"})
        assert one_rank(run, stop) == "stopped"
        found = {p.name for p in run.checkpoints.iterdir()}
        assert f"step-{stop}" in found and len(found) <= 3
    assert steps(run)[:2] == [20, 19]


def test_what_was_passed_over_goes_and_pushes_no_good_checkpoint_out(tmp_path):
    run = make_run(tmp_path, max_steps=4, checkpoint__every=1, checkpoint__keep=2, **CALM)
    one_rank(run)
    data = run.checkpoints / "step-4" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (run.checkpoints / "step-99").mkdir()
    job = json.loads(run.job.read_text())
    job["spec"]["checkpoint"] |= {"every": 0, "keep": 1}
    job["spec"]["max_steps"] = 10**6
    run.job.write_text(json.dumps(job))
    write_json(run.request, {"want": "stop"})
    assert one_rank(run, 2) == "stopped"  # after step 4, taken again
    assert {p.name for p in run.checkpoints.iterdir()} == {"step-4"}
    assert checkpoint.damage(run.checkpoints / "step-4") == ""


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


REPLACE = {"exchanged": publish.publish, "in two renames": publish._replace}


@pytest.mark.parametrize("how", REPLACE)
def test_a_checkpoint_is_replaced_by_a_whole_one(two, how):
    target, aside = two
    new = (aside / "meta.json").read_bytes()
    REPLACE[how](aside, target)
    assert (target / "meta.json").read_bytes() == new and checkpoint.damage(target) == ""
    assert not aside.exists() and checkpoint.complete(target.parent) == [target]


@pytest.mark.parametrize("how", REPLACE)
def test_what_was_taken_away_replaces_nothing(two, how):
    target, aside = two
    before = (target / "meta.json").read_bytes()
    aside.parent.rename(aside.parent.with_name(".gone-1234"))
    with pytest.raises(FileNotFoundError):
        REPLACE[how](aside, target)
    assert (target / "meta.json").read_bytes() == before
    assert checkpoint.complete(target.parent) == [target]


def test_between_two_renames_the_old_one_is_found_and_not_tidied_away(two):
    target, _ = two
    target.rename(checkpoint.old(target))
    publish.tidy(target.parent)
    assert checkpoint.complete(target.parent) == [checkpoint.old(target)]
    assert checkpoint.step_of(checkpoint.old(target)) == 2
