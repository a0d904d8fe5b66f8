"""Files that a person's code leaves in its run, from real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import Command
from sites import Site
from toy import TOY

import hpcddp
from hpcddp import rank_results
from hpcddp.attempt import ledger
from hpcddp.dask import DaskResultsHandler
from hpcddp.errors import HpcddpError, LeaseLost, UserError
from hpcddp.rundir import RunDir, written

ONCE = ("--set", "requeue.enabled=false")

SCRIPT = """
import os
from pathlib import Path
import hpcddp

rank = os.environ["RANK"]
for i in range(50):
    hpcddp.submit_result(f"worker/{rank}/{i}.txt", f"größe {rank} {i}")
hpcddp.submit_result(f"again-{rank}", "first")
hpcddp.submit_result(f"again-{rank}", b"second")
own = Path(f"local-{rank}")
own.write_bytes(rank.encode() * 3_000_000)
hpcddp.submit_result(f"file-{rank}", own)
"""

# Fails at step 4, and goes on from step 2.
CRASHING = """
import os, sys
import hpcddp

rank, attempt = os.environ["RANK"], os.environ["HPCDDP_ATTEMPT"]
for step in range(2 * int(attempt) - 2, 6):
    if step == 4 and attempt == "1":
        sys.exit(1)
    hpcddp.submit_result(f"rank-{rank}/step-{step}", attempt)
"""

PROGRAM = """
import os
import hpcddp
import hpcddp.dask

def train():
    hpcddp.submit_result(f"worker/{os.environ['RANK']}.txt", "from a rank")

if __name__ == "__main__":
    hpcddp.dask.run(hpcddp.dask.client(), train, backend="gloo")
    hpcddp.submit_result("client.txt", "from the client")
"""

# Writes one result again and again, of one letter each time.
WRITER = """
import hpcddp
for i in range(10**9):
    hpcddp.submit_result("x/y", "ab"[i % 2] * 1_000_000)
    if i == 2:
        print("ready", flush=True)
"""

# The second one is larger than any file of this process may be.
LIMITED = """
import resource, hpcddp
from hpcddp.errors import HpcddpError, UserError
hpcddp.submit_result("a", "small")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for path in "ab":
    try:
        hpcddp.submit_result(path, bytes(2000))
    except HpcddpError as error:
        print(isinstance(error, UserError), error)
hpcddp.submit_result("c", "small too")
"""


def found(folder: Path) -> dict[str, bytes]:
    """What a folder holds, hidden files included."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def newest(site: Site) -> RunDir:
    return RunDir(max(site.runs.glob("*-*"), key=lambda path: path.stat().st_mtime_ns))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run in its first attempt, of which the environment tells."""
    made = RunDir(tmp_path / "run")
    made.create()
    begin(made)
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(made.path))
    monkeypatch.setenv("HPCDDP_ATTEMPT", "1")
    return made


def begin(run: RunDir) -> None:
    facts = ledger.Attempt(0, "7", "n1", 1, "1", True, "n1", 1.0)
    assert ledger.begin(run, facts, lambda earlier: False)


@pytest.mark.parametrize("launcher", ["spawn", "fork", "torchrun"])
def test_what_ranks_of_a_script_send_is_in_the_run_once(
    site: Site, command: Command, launcher: str
) -> None:
    site.write("script.py", SCRIPT)
    words = ("--launcher", launcher, "--", sys.executable, "script.py")
    done = command("submit", "--gpus", "2", *ONCE, *words)
    assert done.code == 0, done.text
    expected = {
        f"worker/{r}/{i}.txt": f"größe {r} {i}".encode() for r in range(2) for i in range(50)
    }
    expected |= {f"again-{r}": b"second" for r in range(2)}
    expected |= {f"file-{r}": str(r).encode() * 3_000_000 for r in range(2)}
    assert found(newest(site).results) == expected
    assert found(newest(site).attempt(1).sending) == {}


def test_a_step_that_is_taken_again_leaves_one_result(site: Site, command: Command) -> None:
    site.write("script.py", CRASHING)
    done = command("submit", "--gpus", "1", "--", sys.executable, "script.py")
    assert done.code == 0, done.text
    expected = {f"rank-0/step-{step}": b"1" if step < 2 else b"2" for step in range(6)}
    assert found(newest(site).results) == expected


def test_what_a_task_sends_is_in_its_run(site: Site, command: Command) -> None:
    send = """
import hpcddp
def metrics(output, target):
    hpcddp.submit_result("seen.txt", "x")
    return {}
"""
    site.job("toy", "global_batch = 8\nmax_steps = 2\n", TOY + send)
    for words in (["run"], ["submit", "--gpus", "2"]):
        done = command(words[0], "toy", *words[1:])
        assert done.code == 0, done.text
        assert found(newest(site).results) == {"seen.txt": b"x"}
    assert not (site.folder / "results").exists()


def test_what_ranks_on_dask_workers_send_is_in_the_run(site: Site, command: Command) -> None:
    site.write("program.py", PROGRAM)
    words = ("--launcher", "dask", "--", sys.executable, "-m", "hpcddp.dask", "program.py")
    done = command("submit", "--gpus", "2", *ONCE, *words)
    assert done.code == 0, done.text
    sent = {f"worker/{rank}.txt": b"from a rank" for rank in range(2)}
    assert found(newest(site).results) == sent | {"client.txt": b"from the client"}


def test_outside_of_a_job_they_are_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPCDDP_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    hpcddp.submit_result("a/b.txt", "x")
    assert found(tmp_path) == {"results/a/b.txt": b"x"}


def test_a_rank_that_is_killed_leaves_a_whole_one(run: RunDir) -> None:
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout and writer.stdout.readline() == "ready\n"
            writer.send_signal(signal.SIGKILL)
        there = found(run.results)
        assert there.keys() == {"x/y"} and there["x/y"] in (b"a" * 1_000_000, b"b" * 1_000_000)
    begin(run)  # and the next attempt takes away what it was at
    assert not run.attempt(1).sending.exists()


def test_a_life_that_was_outlived_writes_nothing_more(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    hpcddp.submit_result("a", "old")
    hpcddp.submit_result("b", "old")
    sending = run.attempt(1).sending
    with pytest.raises(FileNotFoundError), written(run.results / "a", desk=sending) as file:
        file.write(b"in the middle of it")
        begin(run)
    for path in ("a", "new/c"):
        with pytest.raises(LeaseLost, match="attempt 1 is superseded"):
            hpcddp.submit_result(path, "late")
    assert (
        found(run.results) == {"a": b"old", "b": b"old"} and len(list(run.results.iterdir())) == 2
    )
    monkeypatch.setenv("HPCDDP_ATTEMPT", "2")
    hpcddp.submit_result("a", "new")
    assert found(run.results) == {"a": b"new", "b": b"old"}


def test_a_client_in_a_run_that_was_outlived_writes_nothing_there_either(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "work").mkdir()
    monkeypatch.chdir(run.path / "work")
    Path("link").symlink_to(tmp_path)
    begin(run)
    for folder in (run.results, Path("relative")):
        with pytest.raises(LeaseLost):
            rank_results.place(folder, "x", "late", rank_results.writing_attempt(folder))
    for folder in (tmp_path / "else", Path("link/else"), Path("..", "..", "else")):
        rank_results.place(folder, "x", "y", rank_results.writing_attempt(folder))
    assert found(tmp_path / "else") == {"x": b"y"}


def test_a_full_disk_is_told_and_keeps_the_earlier_ones(run: RunDir) -> None:
    words = [sys.executable, "-c", LIMITED]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"False {run.results}/a: cannot write the result: File too")
    assert found(run.results) == {"a": b"small", "c": b"small too"}
    assert found(run.attempt(1).sending) == {}


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", ".", "a\0b"])
def test_a_path_cannot_leave_its_folder(run: RunDir, path: str) -> None:
    handler = DaskResultsHandler("k")
    for send in (hpcddp.submit_result, handler.submit_result):
        with pytest.raises(UserError, match="is not that of a file in the folder"):
            send(path, "x")
    with pytest.raises(UserError, match="is not that of a file in the folder"):
        rank_results.place(run.path / "out", path, b"x")  # whoever has sent it
    assert not run.results.exists() and not (run.path / "out").exists()


def test_nor_through_a_link(run: RunDir) -> None:
    outside = run.path / "else"
    outside.mkdir()
    (outside / "file").write_text("mine")
    run.results.mkdir()
    (run.results / "link").symlink_to(outside)
    (run.results / "file").symlink_to(outside / "file")
    (run.results / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="a link leaves the folder"):
        hpcddp.submit_result("link/x/y", "x")
    with pytest.raises(UserError, match="cannot write the result"):
        hpcddp.submit_result("loop/x", "x")
    hpcddp.submit_result("file", "x")  # takes the place of the link
    assert found(outside) == {"file": b"mine"} and not (run.results / "file").is_symlink()


def test_what_cannot_be_a_result_is_told(run: RunDir) -> None:
    hpcddp.submit_result("a", "x")
    hpcddp.submit_result("folder/b", "x")
    pipe = run.path / "pipe"
    os.mkfifo(pipe)
    for path, data, told in [
        ("a/b", "x", "cannot write the result: "),
        ("folder", "x", "cannot write the result: "),
        ("n" * 300, "x", "cannot write the result: "),
        ("\ud800", "x", "cannot write the result: "),
        ("c", "\ud800", "is not valid text"),
        ("c", {}, "got dict"),
        ("c", run.path / "missing", "cannot read the file: No such file"),
        ("c", run.path, "must be a regular file"),
        ("c", pipe, "must be a regular file"),
        (Path("c"), "x", "got PosixPath"),
    ]:
        with pytest.raises(UserError, match=told):
            hpcddp.submit_result(path, data)  # type: ignore[arg-type]
    for item, told in [
        ({}, "got dict"),
        (pipe, "must be a regular file"),
        ("\ud800", "is not valid text"),
    ]:
        with pytest.raises(UserError, match=told):
            DaskResultsHandler("k").submit_result("c", item)  # type: ignore[arg-type]
    assert found(run.results) == {"a": b"x", "folder/b": b"x"}
    assert found(run.attempt(1).sending) == {}


def test_a_run_that_is_gone_is_told(run: RunDir, tmp_path: Path) -> None:
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(HpcddpError, match="cannot write the result: No such file") as caught:
        hpcddp.submit_result("a", "x")
    assert not isinstance(caught.value, LeaseLost)
