import os
import stat
from pathlib import Path

import pytest

from hpcddp import rundir
from hpcddp.errors import RunError
from hpcddp.rundir import RunDir


def modes(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def generous_umask() -> object:
    """What many clusters give their users: new files are the group's too."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous_umask")
def test_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "toy")
    run.create()
    rundir.write_json(run.job, {"a": 1})
    rundir.write_text(run.script, "#!/bin/bash\n", 0o755)
    assert modes(run.path) == 0o700
    assert modes(run.job) == 0o644  # the batch script refuses what others can write to
    assert modes(run.script) == 0o755


def test_a_run_is_made_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "toy")
    run.create()
    with pytest.raises(RunError, match="cannot make the run folder: File exists"):
        run.create()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunError, match="cannot make the run folder") as caught:
        RunDir(tmp_path / "runs" / "toy").create()
    assert caught.value.where == str(tmp_path / "runs")
    assert "--runs" in caught.value.hint


def test_a_relative_path_means_the_same_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir("runs/toy")
    monkeypatch.chdir("/")
    assert run.job == tmp_path / "runs" / "toy" / "job.json"


def test_attempts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "toy")
    assert run.all_attempts() == []
    run.create()
    for name in ("10", "9", "1", ".11.aside", "notes"):
        (run.attempts / name).mkdir()
    assert [a.number for a in run.all_attempts()] == [1, 9, 10]


def test_a_file_is_there_wholly_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    rundir.write_json(path, {"a": 1})
    with pytest.raises(UnicodeEncodeError):
        rundir.write_text(path, "half\udcff")
    assert rundir.read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_json_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    assert rundir.read_json(tmp_path / "gone.json") is None
    path = tmp_path / "a.json"
    for text in ("{", "[1]", "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(RunError) as caught:
            rundir.read_json(path)
        assert caught.value.where == str(path)


def test_a_line_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(rundir.read_lines(path)) == []
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n{"ste')
    assert list(rundir.read_lines(path)) == [{"step": 1}, {"step": 3}]


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    assert rundir.runs_in(tmp_path / "gone") == []
    for when, name in enumerate(("b", "c", "a")):
        run = RunDir(tmp_path / name)
        run.create()
        rundir.write_json(run.job, {})
        os.utime(run.job, ns=(when, when))
    (tmp_path / "half").mkdir()
    assert [run.name for run in rundir.runs_in(tmp_path)] == ["a", "c", "b"]


def test_ids_begin_with_the_name_and_differ() -> None:
    ids = {rundir.new_id("toy") for _ in range(20)}
    assert len(ids) > 15
    assert all(i.startswith("toy-20") for i in ids)
