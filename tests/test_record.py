from pathlib import Path

import pytest
from sites import record_run

from hpcddp import record
from hpcddp.errors import RunError
from hpcddp.rundir import RunDir, read_json, write_json


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "toy-1")
    made.create()
    return record_run(made, (1, 3), 2, spec={"seed": 3}, host_suffix="-ib0")


def test_what_was_written_is_read(run: RunDir) -> None:
    job = record.read(run)
    assert (job.run, job.nodes, job.spec, job.host_suffix) == ("toy-1", [1, 3], {"seed": 3}, "-ib0")
    assert job.world_size == 6
    record.write(run, job)
    assert record.read(run) == job


def test_a_run_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run here") as caught:
        record.read(RunDir(tmp_path / "gone"))
    assert caught.value.where == str(tmp_path / "gone")


def test_another_format_is_not_guessed_at(run: RunDir) -> None:
    write_json(run.job, (read_json(run.job) or {}) | {"format": 2, "shape": "new"})
    with pytest.raises(RunError, match="has format 2, expected 1"):
        record.read(run)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ({"nodes": 2}, "is damaged: nodes"),
        ({"nodes": [1]}, "is damaged: nodes"),
        ({"gpus_per_node": "4"}, "is damaged: gpus_per_node"),
        ({"spec": None}, "is damaged: spec"),
        ({"shape": "new"}, "is damaged: .*shape"),
    ],
)
def test_damage_is_named(run: RunDir, damage: dict[str, object], what: str) -> None:
    write_json(run.job, (read_json(run.job) or {}) | damage)
    with pytest.raises(RunError, match=what) as caught:
        record.read(run)
    assert caught.value.where == str(run.job)


def test_what_is_missing_is_named(run: RunDir) -> None:
    write_json(run.job, {"format": 1, "run": "toy-1"})
    with pytest.raises(RunError, match=r"is damaged: .*workdir"):
        record.read(run)
