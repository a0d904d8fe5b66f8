"""The files of nodes beside a profile, filled from what runs have recorded."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcddp.attempt.nodes.node_events import NodeEvent
from hpcddp.planning import clusters
from hpcddp.planning.clusters import Profile
from hpcddp.planning.site import site_facts
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.planning.trust import node_book
from hpcddp.planning.trust.node_book import NodeBook
from hpcddp.rundir import RunDir


@pytest.fixture
def book(tmp_path: Path) -> NodeBook:
    return NodeBook(tmp_path / "clusters" / "c.nodes")


def ran(tmp_path: Path, name: str, *hosts: str) -> RunDir:
    """A run that met something on some nodes."""
    run = RunDir(tmp_path / "runs" / name)
    run.path.mkdir(parents=True)
    rows = [NodeEvent(host, "check", "x", f"{name}/1", time.time()) for host in hosts]
    run.node_events.write_text("".join(f"{json.dumps(row._asdict())}\n" for row in rows))
    return run


def counts(book: NodeBook) -> dict[str, int]:
    return {row.host: row.count(time.time()) for row in book.histories()}


def test_each_event_is_gathered_once(tmp_path: Path, book: NodeBook) -> None:
    book.gather()
    assert not book.path.exists()
    book.register(ran(tmp_path, "a-1", "n1", "n2"))
    book.register(ran(tmp_path, "b-1", "n1"))
    ran(tmp_path, "unknown-1", "n9")
    for _ in range(2):
        book.gather()
        assert counts(book) == {"n1": 2, "n2": 1}


def test_elements_of_an_array_are_gathered(tmp_path: Path, book: NodeBook) -> None:
    book.register(ran(tmp_path, "a-1", "n1"))
    for element in (0, 7):
        ran(tmp_path, f"a-1_{element}", "n3")
    for other in ("a-1_x", "a-1_", "a-12_3", "b-1_3"):
        ran(tmp_path, other, "n9")
    book.gather()
    assert counts(book) == {"n1": 1, "n3": 2}


def test_what_lies_in_another_users_folder_or_behind_a_link_is_no_element(
    tmp_path: Path, book: NodeBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.register(ran(tmp_path, "a-1"))
    ran(tmp_path, "a-1_0", "n3")
    (tmp_path / "runs" / "a-1_1").symlink_to(ran(tmp_path, "elsewhere", "n4").path)
    assert [row.host for row in book.up_to_date()] == ["n3"]
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert book.up_to_date() == []


def test_of_many_elements_the_last_ones_are_gathered(
    tmp_path: Path, book: NodeBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_book, "ELEMENTS", 2)
    book.register(ran(tmp_path, "a-1"))
    for element in (8, 9, 10):
        ran(tmp_path, f"a-1_{element}", f"n{element}")
    book.gather()
    assert counts(book) == {"n10": 1, "n9": 1}


def test_what_is_up_to_date_need_not_be_saved(tmp_path: Path, book: NodeBook) -> None:
    book.add([NodeEvent("n1", "check", "x", "doctor/1", time.time())])
    book.register(ran(tmp_path, "a-1", "n1", "n2", "../x"))
    before = {path: path.read_bytes() for path in book.path.iterdir()}
    assert {row.host: row.count(time.time()) for row in book.up_to_date()} == {"n1": 2, "n2": 1}
    assert {path: path.read_bytes() for path in book.path.iterdir()} == before


def test_files_that_are_damaged_or_have_strange_names_do_no_harm(
    tmp_path: Path, book: NodeBook
) -> None:
    run = ran(tmp_path, "a-1", "n1", "../x", ".lock", "n 2")
    run.node_events.write_bytes(run.node_events.read_bytes() + b"\xff{\n")
    book.register(run)
    book.register(RunDir(tmp_path / "runs" / "removed-1"))
    (book.path / "n1.json").write_bytes(b"\xff")
    book.gather()
    assert counts(book) == {"n1": 1}
    assert sorted(path.name for path in book.path.iterdir()) == [".lock", "n1.json", "runs"]


def test_many_commands_at_once_lose_nothing(tmp_path: Path, book: NodeBook) -> None:
    for i in range(6):
        book.register(ran(tmp_path, f"a-{i}", "n1", f"n{i + 2}"))
    code = f"""
from pathlib import Path
from hpcddp.planning.trust.node_book import NodeBook
book = NodeBook(Path({str(book.path)!r}))
for _ in range(5):
    book.gather()
    book.leave_out("n7", 9e9)
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert counts(book) == {"n1": 6, **{f"n{i}": 1 for i in range(2, 8)}}
    assert max(row.wanted for row in book.histories()) == 9e9


def test_a_person_trusts_a_node_again(tmp_path: Path, book: NodeBook) -> None:
    book.register(ran(tmp_path, "a-1", "n1"))
    book.gather()
    book.forgive("n1", time.time() + 1)
    book.gather()
    assert counts(book) == {"n1": 0}


def test_old_runs_are_forgotten(
    tmp_path: Path, book: NodeBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_book, "RUNS", 2)
    for i in range(5):
        book.register(ran(tmp_path, f"a-{i}", f"n{i}"))
    book.gather()
    assert counts(book) == {"n3": 1, "n4": 1}
    assert len((book.path / "runs").read_text().splitlines()) == 2


def test_a_folder_that_cannot_be_written_stops_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    book = NodeBook(tmp_path / "file" / "c.nodes")
    book.register(ran(tmp_path, "a-1", "n1"))
    book.gather()
    assert book.histories() == []


def test_each_cluster_has_a_book_of_its_own(tmp_path: Path) -> None:
    """Also if two share the profile, or two profiles have one file name."""
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    undetected = clusters.load("slurm", environ)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.toml").write_text("")
    first, second = (clusters.read(tmp_path / folder / "own.toml") for folder in ("a", "b"))
    site_facts.save(second.path, SiteFacts("wice", "", time.time()))

    def name(profile: Profile, cluster: str = "") -> str:
        return NodeBook.of(profile, environ, cluster).path.name

    assert (name(undetected, "lab"), name(undetected, "wice")) == ("lab.nodes", "wice.nodes")
    assert (name(first, "lab"), name(second)) == ("lab.nodes", "wice.nodes")
    assert name(undetected, "slurm") == "slurm-cluster.nodes"  # as its profile
    assert name(undetected) == name(undetected, "../x") == "slurm.nodes"


def test_a_sandbox_has_a_book_of_its_own(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    profile = clusters.load("slurm", environ)
    of_cluster = NodeBook.of(profile, environ)
    own = NodeBook.of(profile, environ | {"HPCDDP_SANDBOX": "/tmp/slurm"}, "sandbox-7")
    assert own.path == NodeBook.named(node_book.SANDBOX, environ).path
    own.add([NodeEvent("n1", "check", "x", "a-1/1", time.time())])
    assert (counts(of_cluster), counts(own)) == ({}, {"n1": 1})
    own.remove()
    assert not own.path.exists()
