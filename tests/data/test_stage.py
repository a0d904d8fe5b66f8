"""Staging on one node: real files, killed processes, a small disk, a real store."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from mounts import mounts
from sites import record_run

from hpcddp import cgroups
from hpcddp.attempt import ledger
from hpcddp.data import names, sources
from hpcddp.data.node_cache import claims, disk
from hpcddp.data.stage import StagedCopy, folder_of
from hpcddp.errors import StageError, UserError
from hpcddp.rundir import RunDir, write_json
from hpcddp.topology import Rank

BIG = 48 << 20


def always() -> bool:
    return True


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A typical folder: hidden files, links, a cycle, a broken link, a socket."""
    root = tmp_path / "proj" / "pets"
    (root / "cats").mkdir(parents=True)
    (root / "empty").touch()
    (root / ".hidden").write_text("too")
    for number in range(40):
        (root / "cats" / f"{number}.jpg").write_bytes(os.urandom(100 + number))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "linked").symlink_to("cats")
    (root / "cats" / "circle").symlink_to(root)
    (root / "lost").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    return root


def contents(root: Path) -> dict[str, bytes]:
    by_name = {}
    for path in root.rglob("*"):
        if path.is_file() and path.name not in ("pipe", ".owner"):
            by_name[str(path.relative_to(root))] = path.read_bytes()
    return by_name


def test_files_folders_and_links_are_copied_once(tmp_path: Path, source: Path, capfd) -> None:
    single = tmp_path / "one file.tar"
    single.write_bytes(b"x" * 1000)
    node = tmp_path / "node"
    node.mkdir()
    made = StagedCopy(node, [str(source), f"{single}"], 1)
    assert made.copy(always)
    assert "staged 10.3 KB in" in capfd.readouterr().out
    assert (node / "one file.tar").read_bytes() == b"x" * 1000
    copy = node / "pets"
    assert (copy / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (copy / ".hidden").read_text() == "too" and not (copy / "pipe").exists()
    assert not (copy / "cats" / "circle").exists() and not (copy / "lost").exists()
    for number in range(40):
        name = f"{number}.jpg"
        data = (source / "cats" / name).read_bytes()
        assert (copy / "cats" / name).read_bytes() == (copy / "linked" / name).read_bytes() == data
    before = {path: path.stat().st_ino for path in node.rglob("*.jpg")}
    assert StagedCopy(node, [str(source), f"{single}"], 1).copy(always)
    assert "all of it already present" in capfd.readouterr().out
    assert {path: path.stat().st_ino for path in node.rglob("*.jpg")} == before


def test_what_has_changed_is_copied_anew(tmp_path: Path, source: Path) -> None:
    node = tmp_path / "node"
    node.mkdir()
    StagedCopy(node, [str(source)], 1).copy(always)
    kept = (node / "pets/cats/2.jpg").stat().st_ino
    one = source / "cats/1.jpg"
    one.write_bytes(b"y" * one.stat().st_size)  # with the same size, but newer
    (source / "cats/new.jpg").write_bytes(b"new")
    (node / "pets/cats/3.jpg").write_bytes(b"cut")  # another program wrote into the copy
    StagedCopy(node, [str(source)], 1).copy(always)
    assert (node / "pets/cats/1.jpg").read_bytes() == one.read_bytes()
    assert (node / "pets/cats/new.jpg").read_bytes() == b"new"
    assert (node / "pets/cats/3.jpg").read_bytes() == (source / "cats/3.jpg").read_bytes()
    assert (node / "pets/cats/2.jpg").stat().st_ino == kept


SLOWLY = """
import sys, time
from pathlib import Path
from hpcddp.data import sources
from hpcddp.data.stage import StagedCopy
sources.BLOCK = 1 << 20
read = sources.LocalSource.read
def slowly(self, file, start):
    print("from", start, flush=True)
    for data in read(self, file, start):
        yield data
        print("block", flush=True)
        time.sleep(float(sys.argv[3]))
sources.LocalSource.read = slowly
StagedCopy(Path(sys.argv[2]), [sys.argv[1]], 1).copy(lambda: True)
"""


def test_a_big_file_goes_on_where_a_kill_cut_it(tmp_path: Path) -> None:
    big, node = tmp_path / "big.tar", tmp_path / "node"
    with big.open("wb") as file:
        for _ in range(BIG >> 20):
            file.write(os.urandom(1 << 20))
    node.mkdir()
    words = [sys.executable, "-c", SLOWLY, big, node]
    first = subprocess.Popen([*words, "0.3"], stdout=subprocess.PIPE, text=True)
    assert first.stdout
    lines = [first.stdout.readline() for _ in range(6)]
    assert lines == ["from 0\n", *["block\n"] * 5]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (node / "big.tar").exists()
    done = subprocess.run([*words, "0"], capture_output=True, text=True, check=True)
    begun = int(done.stdout.split()[1])
    assert 4 << 20 <= begun < BIG
    assert (node / "big.tar").read_bytes() == big.read_bytes()
    assert not (node / ".parts").exists()
    assert "of it already present" in done.stdout


def test_it_stops_when_it_is_not_wanted(tmp_path: Path, source: Path) -> None:
    node = tmp_path / "node"
    node.mkdir()
    assert not StagedCopy(node, [str(source)], 1).copy(lambda: False)
    assert StagedCopy(node, [str(source)], 1).copy(always)


def test_it_stops_at_once_where_a_source_does_not_answer(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, asked, answer = tmp_path / "node", threading.Event(), threading.Event()
    node.mkdir()

    def silent(self: sources.LocalSource, file: sources.File, start: int) -> Iterator[bytes]:
        asked.set()
        answer.wait()
        yield b"late"

    monkeypatch.setattr(sources.LocalSource, "read", silent)
    ends: list[bool] = []
    made = StagedCopy(node, [str(source)], 1)
    copying = threading.Thread(target=lambda: ends.append(made.copy(lambda: not asked.is_set())))
    copying.start()
    copying.join(20)
    stopped = list(ends)
    answer.set()
    copying.join()
    assert stopped == [False]
    monkeypatch.undo()
    assert StagedCopy(node, [str(source)], 1).copy(always)
    assert (node / "pets/cats/3.jpg").read_bytes() == (source / "cats/3.jpg").read_bytes()


def test_a_source_that_changes_meanwhile_or_is_not_there_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    with pytest.raises(UserError, match=r"no such folder.*cannot stage"):
        StagedCopy(node, [str(tmp_path / "no such folder")], 1).copy(always)
    look = StagedCopy._look

    def cut(self: StagedCopy) -> object:
        missing = look(self)
        (source / "cats/5.jpg").write_bytes(b"cut")
        return missing

    monkeypatch.setattr(StagedCopy, "_look", cut)
    with pytest.raises(StageError, match=r"(cats|linked)/5.jpg: expected 105 bytes, got 3"):
        StagedCopy(node, [str(source)], 1).copy(always)


SMALL = """
import os, subprocess, sys
from pathlib import Path
from hpcddp.data.stage import StagedCopy
from hpcddp.errors import UserError
from hpcddp.data.node_cache import disk
node = Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", node], check=True)
def attempt():
    try: StagedCopy(node, [sys.argv[1]], 1).copy(lambda: True)
    except UserError as error: print(error)
attempt()
free = disk.free
disk.free = lambda path: (1 << 40, 1 << 40)  # what others take while it copies
attempt()
"""


def test_a_disk_without_room_is_told_with_both_numbers(tmp_path: Path) -> None:
    big, node = tmp_path / "big.tar", tmp_path / "node"
    node.mkdir()
    with big.open("wb") as file:
        file.truncate(BIG)
    if not (within := mounts()):  # the numbers at least
        made = StagedCopy(node, [str(big)], 1)
        made._need = 1 << 60
        with pytest.raises(UserError, match="no space to stage"):
            made._check_room()
        return
    done = subprocess.run([*within, sys.executable, "-c", SMALL, big, node],
                          capture_output=True, text=True, check=True)  # fmt: skip
    before, _, after = done.stdout.partition("\n  ")
    assert "48 MB needed, 4 MB of memory free" in before
    assert "of memory free" in after and "TMPDIR" in after


def test_what_is_staged_in_memory_counts_as_the_jobs(tmp_path: Path, monkeypatch) -> None:
    node = tmp_path / "node"
    node.mkdir()
    (tmp_path / "big").write_bytes(b"x" * 40_000)
    (tmp_path / "mounts").write_text(f"none {node} tmpfs rw 0 0\n")
    monkeypatch.setattr(disk, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cgroups, "memory_left", lambda: 30_000.0)
    with pytest.raises(UserError, match="of memory free"):
        StagedCopy(node, [str(tmp_path / "big")], 1).copy(always)


def test_a_store_is_staged_too(tmp_path: Path, s3_server: Any, monkeypatch) -> None:
    """Also a single object, and also while the store does not answer for a moment."""
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    s3_server.door.open()
    big = os.urandom(9 << 20)  # more than a block
    s3_server.put("staged", {"a/pets/": b"", "a/pets/x/1.jpg": b"one", "a/pets/big.tar": big})
    entries = ["s3://staged/a/pets", "s3://staged/a/pets/big.tar"]
    s3_server.door.shut_for(1.0)
    assert StagedCopy(tmp_path, entries, 30).copy(always)
    assert contents(tmp_path) == {"pets/x/1.jpg": b"one", "pets/big.tar": big, "big.tar": big}
    s3_server.client().put_object(Bucket="staged", Key="a/pets/x/1.jpg", Body=b"two")
    before = (tmp_path / "big.tar").stat().st_ino
    assert StagedCopy(tmp_path, entries, 30).copy(always)
    assert (tmp_path / "pets/x/1.jpg").read_bytes() == b"two"
    assert (tmp_path / "big.tar").stat().st_ino == before
    with pytest.raises(UserError, match="no objects to stage"):
        StagedCopy(tmp_path, ["s3://staged/a/dogs"], 1).copy(always)
    s3_server.put("sly", {"p/../../../out": b"x"})
    with pytest.raises(UserError, match="leads out of the staging folder"):
        StagedCopy(tmp_path, ["s3://sly/p"], 1).copy(always)


def test_one_object_of_a_store_is_staged_without_a_look_at_the_others(
    tmp_path: Path, s3_server: Any, monkeypatch
) -> None:
    """Credentials for one object may not allow listing the bucket, which may be large."""
    import fsspec

    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    s3_server.put("one", {"weights.tar": b"right", "weights.tar.old": b"old", "other": b"other"})
    fsspec.filesystem("memory").pipe("/one/pets.tar", b"pets")
    fsspec.filesystem("memory").pipe("/one/pets.tar.old", b"old")
    s3_server.door.open()
    s3_server.door.answer(403, "AccessDenied", to="prefix= HTTP")
    try:
        with pytest.raises(UserError, match="access denied"):
            StagedCopy(tmp_path, ["s3://one"], 1).copy(always)
        entries = ["s3://one/weights.tar", "memory://one/pets.tar"]
        assert StagedCopy(tmp_path, entries, 1).copy(always)
    finally:
        s3_server.door.open()
    assert contents(tmp_path) == {"weights.tar": b"right", "pets.tar": b"pets"}
    with pytest.raises(UserError, match="no objects to stage"):
        StagedCopy(tmp_path, ["memory://one/dogs.tar"], 1).copy(always)


def run_of(path: Path, cause: str | None = None, action: str = "") -> RunDir:
    run = RunDir(path)
    run.path.mkdir(parents=True)
    record_run(run)
    if cause is not None:
        folder = run.attempts / "1"
        folder.mkdir(parents=True)
        facts = ledger.new_attempt("1", os.getpid())
        facts.number, facts.cause, facts.action = 1, cause or None, action
        write_json(folder / "attempt.json", asdict(facts))
    return run


def test_what_runs_that_are_over_left_goes(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    environ, rank = {"TMPDIR": str(tmp_path / "node")}, Rank(0, 1, 0, 1, 0)
    runs = {
        "done": run_of(tmp_path / "a" / "done", "done", "none"),
        "failed": run_of(tmp_path / "a" / "failed", "crash", "none"),
        "comes back": run_of(tmp_path / "a" / "comes back", "preempted", "requeue"),
        "lives": run_of(tmp_path / "a" / "lives", ""),
        "new": run_of(tmp_path / "a" / "new"),
        "deleted": run_of(tmp_path / "a" / "deleted", ""),
        "deleted just now": run_of(tmp_path / "a" / "deleted just now", ""),
        "trains unseen": run_of(tmp_path / "a" / "trains unseen", ""),
        "trains elsewhere": run_of(tmp_path / "a" / "trains elsewhere", ""),
    }
    folders = {n: folder_of(r, rank, local=False, environ=environ) for n, r in runs.items()}
    for folder in folders.values():
        (folder / "data").touch()
    code = "from hpcddp.data.node_cache import claims; print(claims.mark(), end='')"
    gone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    days = {
        "deleted": (gone, 2),
        "deleted just now": (gone, 0.5),
        "trains unseen": (claims.mark(), 20),
        "trains elsewhere": ("7-7-00000000", 5),
    }
    for name, (who, age) in days.items():  # the folder of their runs is not visible here
        shutil.rmtree(runs[name].path)
        write_json(folders[name] / ".owner", {"who": who, "turn": ""})
        for path in (folders[name] / ".owner", folders[name].parent):
            os.utime(path, (time.time() - age * 86400,) * 2)
    own = folder_of(run_of(tmp_path / "own"), rank, local=False, environ=environ)
    StagedCopy(own, [str(tmp_path / "a" / "new" / "job.json")], 1).copy(always)
    assert {name for name, folder in folders.items() if folder.exists()} == {
        "comes back", "lives", "new", "deleted just now", "trains unseen", "trains elsewhere"
    }  # fmt: skip
    owner = json.loads((own / ".owner").read_text())
    assert owner["who"] == claims.mark()
    same = RunDir(tmp_path / "b" / "new")  # with the same name
    same.path.mkdir(parents=True)
    assert folder_of(same, rank, local=False, environ=environ) != folders["new"]
    two = [folder_of(same, Rank(n, 2, 0, 1, n), local=True, environ=environ) for n in (0, 1)]
    assert two[0] != two[1]


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        (["/"], "does not end in a name"),
        ([""], "does not end in a name"),
        (["/proj/.."], "does not end in a name"),
        (["s3://"], "does not end in a name"),
        (["/proj/pets", "s3://bucket/pets/"], "have the same name 'pets'"),
    ],
)
def test_entries_without_a_name_of_their_own_are_refused(entries: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        names.check(entries, {}, {})


def test_the_dataset_names_what_is_staged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset.root is '\$STAGE/pets', but data.stage is empty"):
        names.check([], {"root": "$STAGE/pets"}, {})
    names.check(["/proj/pets"], {"root": "${STAGE}/pets"}, {})
    assert names.placed(["pets", "/a", "s3://b/c", "$SCRATCH/d"], tmp_path) == [
        f"{tmp_path}/pets", "/a", "s3://b/c", "$SCRATCH/d"
    ]  # fmt: skip
    assert names.unstaged("$STAGE/pets/train", ["/x/pet", "/x/pets/"]) == "/x/pets/train"
