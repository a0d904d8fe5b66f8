"""Whole runs that stage data, on two virtual nodes of this machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_runs import PATIENCE, Command, end_all
from sites import Outcome, Site, record_run
from told import told
from toy import TOY

from hpcddp import spec
from hpcddp.attempt import ledger, rendezvous
from hpcddp.data import node_wait
from hpcddp.data.node_cache import cache as caches
from hpcddp.data.node_cache import claims
from hpcddp.errors import StageError
from hpcddp.rundir import RunDir, read_lines, write_json

# Each rank's samples are those of its node's own copy, which it names.
READS = TOY.replace("def dataset(split, size=64, pause=0.0):", """
def dataset(split, root, size=64, pause=0.0):
    print("reads", root, open(root + "/data").read(), flush=True)
""")  # fmt: skip
JOB = """
global_batch = 8
max_steps = 4
data.stage = "proj/pets"
dataset.root = "$STAGE/pets"
"""
# Sources are slow as long as there is a file `gate`.
GATE = """
import pathlib, sys, time
if any("hpcddp" in word for word in sys.orig_argv):
    from hpcddp.data import sources
    read = sources.LocalSource.read
    def gated(self, file, start):
        print("held", flush=True)
        while pathlib.Path({gate!r}).exists():
            time.sleep(0.01)
            yield b""
        yield from read(self, file, start)
    sources.LocalSource.read = gated
"""
TELL = """
import json, os
environ = dict(os.environ)
environ["data"] = open(os.environ["HPCDDP_STAGE"] + "/pets/data").read()
open(f"told-{os.environ['RANK']}", "w").write(json.dumps(environ))
"""


@pytest.fixture
def pets(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source, and a node's disk."""
    site.write("proj/pets/data", "meow")
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    yield tmp_path / "node" / f"hpcddp-stage-{os.geteuid()}"
    end_all(site)


@pytest.fixture
def gate(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gate"
    path.touch()
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "sitecustomize.py").write_text(GATE.format(gate=str(path)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "custom"))
    return path


def wait(good: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not good():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def held(site: Site, times: int) -> None:
    """Wait until this many copies have started."""
    wait(
        lambda: any(site.runs.glob("*/log")) and run_of(site).log.read_text().count("held") >= times
    )


def ended(site: Site) -> list[ledger.Attempt]:
    """Wait for the end of the run; return its attempts."""
    run = run_of(site)
    wait(lambda: (last := ledger.last(run)) is not None and last.action == "none")
    return ledger.attempts(run)


def run_of(site: Site) -> RunDir:
    (path,) = site.runs.iterdir()
    return RunDir(path)


def test_a_task_that_is_preempted_while_it_stages_comes_back(
    site: Site, pets: Path, gate: Path, command: Command
) -> None:
    """Each node has its own copy. All its ranks read that copy; it is removed at the end."""
    site.job("toy", JOB, READS)
    command("submit", "--nodes", "2", "--gpus", "2", "--detach")
    held(site, 2)
    assert command("preempt", "last").code == 0
    wait(lambda: len(run_of(site).all_attempts()) == 2)
    gate.unlink()
    attempts, run = ended(site), run_of(site)
    out = run.log.read_text()
    assert [(a.cause, a.exit_code) for a in attempts] == [("preempted", 85), ("done", 0)], out
    (end,) = [r for r in read_lines(run.attempt(1).metrics) if r["event"] == "end"]
    assert (end["outcome"], end["step"]) == ("stopped", 0) and end["by"]
    read = [line.split()[2:] for line in out.splitlines() if ": reads " in line]
    folders = {Path(root).parent for root, _ in read}
    assert len(folders) == 2 and {text for _, text in read} == {"meow"}
    assert {folder.parent.parent for folder in folders} == {pets} and not any(pets.iterdir())
    assert out.count("staged 4 B in") == 2


def test_a_task_whose_source_is_not_there_fails_once(
    site: Site, pets: Path, command: Command
) -> None:
    site.job("toy", JOB.replace("proj/pets", "proj/dogs/pets"), READS)
    done = command("submit", "--nodes", "2", "--gpus", "2")
    assert done.code == 1
    assert "proj/dogs/pets does not exist on this machine, but must exist on the nodes" in done.err
    assert "cannot stage: No such file or directory" in done.err
    assert "Traceback" not in done.text
    assert [a.cause for a in ledger.attempts(run_of(site))] == ["mistake"]


def submit(command: Command, nodes: int, launcher: str, *more: str) -> Outcome:
    words = ("--nodes", f"{nodes}", "--gpus", "2", "--launcher", launcher, "--no-snapshot")
    stage = ("--set", "data.stage=proj/pets")
    return command("submit", *words, *stage, *more, "--", sys.executable, "train.py")


def test_a_program_finds_what_was_staged(
    site: Site, pets: Path, gate: Path, command: Command
) -> None:
    """A run that is preempted during staging is requeued."""
    site.write("train.py", TELL)
    submit(command, 2, "spawn", "--detach")
    held(site, 2)
    assert run_of(site).attempt(1).staging.exists()  # without a limit on the time to the rendezvous
    command("preempt", "last")
    wait(lambda: len(run_of(site).all_attempts()) == 2)
    gate.unlink()
    assert [a.cause for a in ended(site)] == ["preempted", "done"]
    environs = [told(site, rank) for rank in range(4)]
    assert [environ["data"] for environ in environs] == ["meow"] * 4
    folders = [str(environ["HPCDDP_STAGE"]) for environ in environs]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert all(Path(folder).parent.parent == pets for folder in folders)
    assert not run_of(site).attempt(2).staging.exists()


@pytest.mark.parametrize(
    "launcher",
    [
        "fork",
        pytest.param("torchrun", marks=pytest.mark.full),
        pytest.param("dask", marks=pytest.mark.full),
    ],
)
def test_so_it_does_however_it_is_started(
    site: Site, pets: Path, command: Command, launcher: str
) -> None:
    site.write("train.py", TELL)
    done = submit(command, 1, launcher)
    assert done.code == 0, done.text
    assert [told(site, rank)["data"] for rank in range(2)] == ["meow"] * 2


def test_a_program_whose_source_is_not_there_fails_once(
    site: Site, pets: Path, command: Command
) -> None:
    site.write("train.py", TELL)
    words = ("--set", "data.stage=nowhere/pets", "--", sys.executable, "train.py")
    done = command("submit", "--gpus", "2", "--no-snapshot", *words)
    assert done.code == 1 and "cannot stage: No such file" in done.text
    assert "Traceback" not in done.text
    assert [a.cause for a in ledger.attempts(run_of(site))] == ["mistake"]


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StageError, match="local rank 0 did not start to stage"):
        node_wait._follow(tmp_path, "1-5", 0.0, lambda: True)
    gone = f"{os.getpid()}-0"  # the PID of another process
    write_json(tmp_path / ".owner", {"who": gone, "turn": "1-5"})
    monkeypatch.setattr(node_wait, "SILENT", 0.0)
    with pytest.raises(StageError, match="local rank 0 ended"):
        node_wait._follow(tmp_path, "1-5", 9.0, lambda: True)
    write_json(tmp_path / ".owner", {"who": claims.mark(), "turn": "1-5"})
    late = time.monotonic() + 0.5
    node_wait._follow(tmp_path, "1-5", 0.0, lambda: time.monotonic() < late)
    write_json(tmp_path / ".ended-1-5", {"error": ["no room", "n1", "make some"]})
    with pytest.raises(StageError, match="n1: no room"):
        node_wait._follow(tmp_path, "1-5", 9.0, lambda: True)


def test_what_contradicts_is_refused_before_it_is_submitted(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    for text, what in (
        (JOB.replace('data.stage = "proj/pets"\n', ""), "data.stage is empty"),
        (JOB.replace('"proj/pets"', '["a/pets", "s3://b/pets"]'), "have the same name 'pets'"),
        (JOB + 'data.cache = "much"\n', "invalid cache size 'much'"),
        (JOB + 'data.cache = ""\n', "invalid cache size ''"),
    ):
        site.job("toy", text, READS)
        done = hpcddp("submit", "--dry-run")
        assert done.code == 2 and what in done.err


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        ({}, False),
        ({"hang_seconds": 250}, True),
        ({"hang_seconds": 0}, False),
        ({"hang_seconds": 250, "root": "/proj/pets"}, False),
    ],
)
def test_a_store_that_is_away_is_no_hang(
    site: Site, hpcddp: Callable[..., Outcome], values: dict[str, object], warned: bool
) -> None:
    root, seconds = values.get("root", "s3://b/pets"), values.get("hang_seconds", 300)
    text = f'global_batch = 8\ntrain.hang_seconds = {seconds}\ndataset.root = "{root}"\n'
    site.job("toy", text, READS)
    done = hpcddp("submit", "--dry-run")
    assert done.code == 0, done.text
    assert ("set train.hang_seconds to 270 or more" in done.text) == warned
    defaults = spec.JobSpec("x")
    assert caches.WAIT < defaults.train.hang_seconds > defaults.data.retry_seconds


def test_the_time_to_meet_begins_when_all_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "LOOK", 0.02)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    record_run(run, spec={"command": ["x"], "start_seconds": 0.2})
    run.attempt(1).path.mkdir(parents=True)
    run.attempt(1).staging.touch()
    port = str(rendezvous.free_port())
    with subprocess.Popen(["sleep", "60"]) as ranks:
        watching = threading.Thread(
            target=rendezvous.watch, args=(run, 1, ranks.pid, {"MASTER_PORT": port})
        )
        watching.start()
        watching.join(1.0)
        assert watching.is_alive() and ranks.poll() is None
        run.attempt(1).staging.unlink()
        assert ranks.wait(30) == -signal.SIGTERM
        watching.join()
    assert "no process group after 0.2 s" in capfd.readouterr().out
