"""A job's checkpoints on the real Slurm: damaged, without room, read by other numbers of ranks."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import global_steps
from toy import TOY

from hpcddp.rundir import RunDir, read_lines
from hpcddp.train.checkpoint import checkpoint

from .desk import Desk, pids, standing_still, wait_for
from .test_survive import STEADY, finished, lost, resumed

BEST = ("--set", "checkpoint.every=10", "--set", "checkpoint.best_mode=max")  # the first one
# 5 MB with the optimizer's moments.
BIG = TOY.replace("nn.Linear(4, 2)", "nn.Sequential(nn.Linear(4, 60_000), nn.Linear(60_000, 2))")


@pytest.mark.full
def test_a_truncated_checkpoint_is_passed_over(desk: Desk) -> None:
    run = desk.submit(*STEADY, "--set", "checkpoint.every=20")
    folder = RunDir(Path(desk.training(run, step=50)["path"]))
    desk("preempt", run)
    wait_for(lambda: desk.attempts(run)[0].ended)
    newest, before, *_ = checkpoint.complete(folder.checkpoints)
    file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    with file.open("r+b") as f:
        f.truncate(file.stat().st_size // 2)
    finished(desk, run)
    steps = [checkpoint.step_of(path) for path in (newest, before)]
    assert resumed(folder, 2) == steps[1]
    assert lost(folder) == steps[0] - steps[1] <= 20
    assert f"{newest.name} is damaged ({file.name} has " in folder.log.read_text()


def test_what_was_saved_is_not_removed_because_it_cannot_be_read(desk: Desk) -> None:
    """A byte is cut from each checkpoint; then they are whole again, and away for a moment."""
    run = desk.submit(*STEADY, *BEST)
    folder = RunDir(Path(desk.training(run, step=30)["path"]))
    desk("stop", run)
    desk.until(lambda s: s["state"] == "STOPPED", run)
    there = checkpoint.complete(folder.checkpoints)
    assert len(there) == 3  # two, and the best
    files = [max(path.iterdir(), key=lambda file: file.stat().st_size) for path in there]
    before = [file.read_bytes() for file in files]
    for file, content in zip(files, before, strict=True):
        file.write_bytes(content[:-1])
    desk("resume", run)
    ended = desk.until(lambda s: s["state"] == "FAILED", run)
    assert "all checkpoints of this run are damaged; the newest of 3, " in ended["reason"]
    assert [a.cause for a in desk.attempts(run)] == ["stopped", "mistake"]
    for file, content in zip(files, before, strict=True):
        file.write_bytes(file.read_bytes() + content[-1:])
    assert checkpoint.complete(folder.checkpoints) == there
    with unreadable([path / "COMPLETE" for path in there]):
        desk("resume", run)
        wait_for(lambda: "all ranks retry" in desk("logs", run))
    finished(desk, run)
    assert resumed(folder, 3) == checkpoint.step_of(there[0]) and lost(folder) == 0
    assert [a.cause for a in desk.attempts(run)] == ["stopped", "mistake", "done"]
    assert checkpoint.step_of(there[2]) == 8 and there[2].exists()  # the best


@contextlib.contextmanager
def unreadable(files: list[Path]) -> Iterator[None]:
    """Something that nobody can read (EIO) in their places: the memory of this process at 0."""
    try:
        for file in files:
            subprocess.run(["mount", "--bind", f"/proc/{os.getpid()}/mem", file], check=True)
        yield
    finally:
        for file in files:
            subprocess.run(["umount", file], check=True)


@pytest.fixture
def disk(desk: Desk) -> Iterator[Path]:
    """The folder of the runs on a file system of 32 MB."""
    folder = desk.folder / "runs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(
    "leave",
    [pytest.param(100_000, marks=pytest.mark.full), 2_000_000],
    ids=["before a save", "in the middle"],
)
def test_a_disk_that_is_full_for_a_while(desk: Desk, disk: Path, leave: int) -> None:
    """The logs still have room in the first case; the second is full within a file."""
    (desk.folder / "jobs/toy.py").write_text(BIG)
    keys = ("checkpoint.every=10", "checkpoint.keep=2", "checkpoint.best=")
    run = desk.submit(*STEADY, *(word for key in keys for word in ("--set", key)))
    folder = RunDir(Path(desk.training(run, step=20)["path"]))
    ballast = disk / "ballast"
    wait_for(lambda: filled(folder, ballast, leave))
    wait_for(lambda: failed(folder))
    kept = {path.name for path in checkpoint.complete(folder.checkpoints)}
    first = failed(folder)[0]
    desk.training(run, step=first + 15)
    assert {path.name for path in checkpoint.complete(folder.checkpoints)} == kept != set()
    ballast.unlink()
    finished(desk, run)
    assert [a.cause for a in desk.attempts(run)] == ["done"]
    assert checkpoint.step_of(checkpoint.complete(folder.checkpoints)[0]) == 250
    assert f"step {first}  NOT saved: " in desk("logs", run)


def filled(run: RunDir, ballast: Path, leave: int) -> bool:
    """Take the disk's room but for so many bytes, in an instant between two saves.

    The ranks stand still meanwhile: what a save takes or gives back would count.
    """
    with standing_still(pids(run)):
        under_way = [*run.checkpoints.glob(".saving-*/*"), *run.checkpoints.glob(".gone-*")]
        if under_way or len(checkpoint.complete(run.checkpoints)) != 2:
            return False
        ballast.write_bytes(bytes(room(ballast.parent) - leave))
        return True


def room(folder: Path) -> int:
    """Bytes."""
    found = subprocess.run(
        ["df", "--block-size=1", "--output=avail", folder], capture_output=True, check=True
    )
    return int(found.stdout.split()[-1])


def failed(run: RunDir) -> list[int]:
    """The steps that could not be saved."""
    lines = read_lines(run.attempt(1).metrics)
    return [line["step"] for line in lines if line["event"] == "checkpoint_failed"]


@pytest.mark.full
def test_four_ranks_then_two_then_eight(desk: Desk) -> None:
    """Stopped in the middle of an epoch each time: the same global batches in the same order."""
    keys = ("max_steps=150", "dataset.size=811", "dataset.pause=0.02", "train.trace=true")
    job = [word for key in keys for word in ("--set", key)]
    alone = desk.submit(*job, "--set", "dataset.pause=0", "--nodes", "1", "--gpus", "1")
    run = desk.submit(*job, "--nodes", "2", "--gpus", "2")
    desk.training(run, step=10)
    assert "is RUNNING" in desk.result("resume", run).stderr
    desk("stop", run)
    ended = desk.until(lambda s: s["state"] == "STOPPED", run)
    desk("resume", run, "--nodes", "1")
    desk.training(run, attempt=2, step=ended["step"] + 10)
    desk("stop", run)
    ended = desk.until(lambda s: s["state"] == "STOPPED" and s["attempt"] == 2, run)
    assert ended["step"] < 100  # of the first epoch
    desk("resume", run, "--nodes", "2", "--gpus", "4", "--set", "dataset.pause=0")
    ended = desk.until(lambda s: s["state"] == "COMPLETED", run)
    assert (ended["nodes"], ended["gpus_per_node"], ended["hosts"]) == ("2", 4, desk.hosts(2))
    desk.until(lambda s: s["state"] == "COMPLETED", alone)
    folder, expected = desk.run(run), global_steps(desk.run(alone), 1, 1)
    found = {}
    for attempt, ranks in ((1, 4), (2, 2), (3, 8)):
        found |= global_steps(folder, attempt, ranks)
    assert list(found) == list(expected) == list(range(1, 151)) and lost(folder) == 0
    assert [ids for ids, _ in found.values()] == [ids for ids, _ in expected.values()]
    ours, theirs = ([loss for _, loss in x.values()][:50] for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
