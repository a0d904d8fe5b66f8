"""Folders without runs, and words that name no folder."""

import json
from collections.abc import Callable

import pytest
from sites import Outcome, Site

Command = Callable[..., Outcome]
READERS = (["status"], ["logs"], ["why"], ["stop", "last"], ["resume", "last"], ["watch", "--once"],
           ["export", "last", "w.pt"])  # fmt: skip


@pytest.mark.parametrize("arguments", READERS)
def test_an_empty_folder_says_how_to_start(
    site: Site, hpcddp: Command, arguments: list[str]
) -> None:
    done = hpcddp(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {site.runs}: no runs yet") and "hpcddp submit" in done.err
    assert not site.runs.exists()


def test_a_list_of_nothing_says_how_to_start(site: Site, hpcddp: Command) -> None:
    done = hpcddp("ls")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith(f"no runs in {site.runs}\n") and "hpcddp submit" in done.err
    assert json.loads(hpcddp("ls", "--json").out) == {"schema_version": 1, "runs": []}


@pytest.mark.parametrize("command", [["ls"], *READERS, ["submit"], ["render"], ["report", "last"]])
def test_a_file_is_not_a_folder_of_runs(site: Site, hpcddp: Command, command: list[str]) -> None:
    site.slurm()
    done = hpcddp(*command, "--runs", "/etc/passwd")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: /etc/passwd: not a folder\n") and "HPCDDP_RUNS" in done.err


@pytest.mark.parametrize("command", [["ls"], *READERS])
def test_a_folder_that_is_not_there_is_named(
    site: Site, hpcddp: Command, command: list[str]
) -> None:
    done = hpcddp(*command, "--runs", "/nonexistent")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: /nonexistent: no such folder\n")


def test_the_folder_of_a_variable_may_be_made_later(
    site: Site, hpcddp: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.slurm()
    monkeypatch.setenv("HPCDDP_RUNS", str(site.folder / "scratch"))
    assert hpcddp("ls").code == 0
    assert hpcddp("submit").code == 0
    assert (site.folder / "scratch").is_dir()


def test_a_folder_with_a_long_name_is_an_error(site: Site, hpcddp: Command) -> None:
    done = hpcddp("ls", "--runs", "x" * 300)
    assert done.code == 2 and "File name too long" in done.err
    assert "Traceback" not in done.err
