import itertools
import threading
from pathlib import Path

import pytest

from hpcddp.attempt.fence import fence
from hpcddp.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "toy-1")
    made.create()
    return made


def test_a_fence_spares_its_own_folder_and_those_of_newer_attempts(run: RunDir) -> None:
    for number in (1, 2, 3):
        run.attempt(number).path.mkdir()
        run.saving(number).mkdir(parents=True)
    run.saving(9).mkdir()  # of attempts that nobody knows
    for _ in range(2):
        fence(run, 2)
        assert {p.name for p in run.checkpoints.iterdir()} == {".saving-2", ".saving-3"}


def test_a_fence_goes_through_while_the_older_one_writes(run: RunDir) -> None:
    folder = run.saving(1) / "step-1"
    folder.mkdir(parents=True)
    stop, failed = threading.Event(), threading.Event()

    def write() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            try:
                (folder / str(number)).write_text("x")
            except FileNotFoundError:
                failed.set()
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not (folder / "9").exists():
            pass
        fence(run, 2)
        assert failed.wait(10)
        fence(run, 2)
    finally:
        stop.set()
        writer.join()
    assert not run.saving(1).exists()
