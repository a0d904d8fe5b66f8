import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from hpcddp.attempt import decision, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import RunError, RunUnreadable
from hpcddp.rundir import STEP, RunDir, read_json, write_json

ROUNDS = 20
RACER = """
import sys
import threading
from pathlib import Path
from hpcddp.attempt import ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir
for path in sorted(Path(sys.argv[1]).iterdir()):
    sys.stdin.readline()
    facts = Attempt(0, sys.argv[2], "here", 1, "1", False, "", 1.0)
    got = ledger.begin(RunDir(path), facts, lambda earlier: True)
    print(got.number if got else "-", flush=True)
"""


def facts(job_id: str = "7") -> Attempt:
    return Attempt(0, job_id, "n1", 1, "1", True, "n[1-2]", 1.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "toy")
    made.create()
    return made


def test_of_two_lives_that_begin_at_once_one_gets_the_run(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        RunDir(tmp_path / f"{number:02}").create()
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, tmp_path, str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        for number in range(ROUNDS):
            for racer in racers:
                assert racer.stdin
                racer.stdin.write("go\n")
            assert sorted(r.stdout.readline().strip() for r in racers if r.stdout) == ["-", "1"]
            left = [p.name for p in (tmp_path / f"{number:02}" / "attempts").iterdir()]
            assert left == ["1"]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_an_attempt_is_there_with_its_facts_and_its_log(run: RunDir) -> None:
    begun = ledger.begin(run, facts(), lambda earlier: True)
    assert begun and begun.number == 1
    assert ledger.attempts(run) == [begun]
    assert run.log.is_symlink() and run.log.samefile(run.attempt(1).log)


def test_a_life_at_work_keeps_the_run(run: RunDir) -> None:
    ledger.begin(run, facts("7"), lambda earlier: True)
    assert ledger.begin(run, facts("8"), lambda earlier: True) is None
    assert len(ledger.attempts(run)) == 1


def test_a_life_that_is_gone_is_taken_over(run: RunDir) -> None:
    ledger.begin(run, facts("7"), lambda earlier: True)
    asked: list[str] = []

    def works(earlier: Attempt) -> bool:
        asked.append(earlier.job_id)
        return False

    begun = ledger.begin(run, facts("8"), works)
    assert begun and begun.number == 2
    assert asked == ["7"]
    assert run.log.samefile(run.attempt(2).log)


def test_nobody_is_asked_about_a_life_that_has_ended(run: RunDir) -> None:
    ledger.begin(run, facts(), lambda earlier: True)
    ended = ledger.end(run, 1, 85, decision.ASKED)
    assert ended and ended.cause == "stopped" and ended.exit_code == 85 and ended.ended
    begun = ledger.begin(run, facts(), lambda earlier: pytest.fail("asked"))
    assert begun and begun.number == 2
    assert [a.cause for a in ledger.attempts(run)] == ["stopped", None]


@pytest.mark.timeout(20)
def test_a_folder_without_facts_keeps_its_number(run: RunDir) -> None:
    """A rank that was started by hand leaves one."""
    run.attempt(1).path.mkdir()
    run.attempt(1).error.write_text("{}")
    begun = ledger.begin(run, facts(), lambda earlier: True)
    assert begun and begun.number == 2


def save(run: RunDir, step: int, attempt: int) -> Path:
    mark = run.checkpoints / f"step-{step}" / "COMPLETE"
    mark.parent.mkdir(parents=True)
    write_json(mark, {"attempt": attempt})
    return mark


def took(run: RunDir, attempt: int, step: int) -> None:
    run.attempt(attempt).step.write_bytes(STEP.pack(step, 1.0))


def test_a_newest_step_that_cannot_be_read_is_not_0_and_is_known_later(run: RunDir) -> None:
    assert ledger.newest_step(run) == 0
    mark = save(run, 5, attempt=1)
    ledger.begin(run, facts(), lambda earlier: True)
    took(run, 1, step=7)
    mark.rename(aside := run.path / "aside")
    mark.symlink_to(mark)  # ELOOP
    assert ledger.newest_step(run) is None
    ended = ledger.end(run, 1, 1, decision.CRASH, decision.AGAIN)
    assert ended and ended.saved is None and ended.progress  # it spends no budget
    ledger.begin(run, facts(), lambda earlier: True)
    assert [a.checkpoint for a in ledger.attempts(run)] == [5, None]
    ended = ledger.end(run, 2, 1, decision.CRASH, decision.AGAIN)
    assert ended and ended.saved is None and not ended.progress  # it took no step
    aside.replace(mark)
    ledger.begin(run, facts(), lambda earlier: True)
    assert [(a.saved, a.progress) for a in ledger.attempts(run)[:2]] == [(5, True), (5, False)]


def test_the_newest_step_of_a_run_that_is_away_is_not_known(run: RunDir) -> None:
    run.path.rename(run.path.with_name("away"))
    run.path.mkdir()
    assert ledger.newest_step(run) is None


def test_a_damaged_checkpoint_of_a_higher_step_hides_no_progress(run: RunDir) -> None:
    """It stays, and the run goes on from an older one."""
    save(run, 400, attempt=1)
    ledger.begin(run, facts(), lambda earlier: True)
    ledger.end(run, 1, 1, decision.CRASH)
    begun = ledger.begin(run, facts(), lambda earlier: True)
    assert begun and begun.checkpoint == 400
    save(run, 310, attempt=2)
    ended = ledger.end(run, 2, 1, decision.CRASH)
    assert ended and ended.progress and ended.saved == 310


def test_attempts_of_an_earlier_version_are_read(run: RunDir) -> None:
    begun = ledger.begin(run, facts(), lambda earlier: True)
    assert begun
    old = asdict(begun) | {"checkpoint": 3, "saved": 5}
    del old["gained"]
    write_json(run.attempt(1).facts, old)
    assert [(a.saved, a.progress) for a in ledger.attempts(run)] == [(5, True)]


def test_an_attempt_that_is_not_there_cannot_end(run: RunDir) -> None:
    with pytest.raises(RunUnreadable, match="not found"):
        ledger.end(run, 3, 0, decision.DONE)
    assert ledger.last(run) is None
    assert read_json(run.attempt(3).facts) is None


def test_a_damaged_attempt_is_named(run: RunDir) -> None:
    folder = run.attempt(1)
    folder.path.mkdir()
    write_json(folder.facts, {"number": 1})
    with pytest.raises(RunError, match="damaged file"):
        ledger.read(folder)


def test_a_new_life_takes_away_what_older_ones_write_in(run: RunDir) -> None:
    """The older one's folder has no name from then on, so that it can rename nothing out of it."""
    for number in (1, 2):
        ledger.begin(run, facts(str(number)), lambda earlier: False)
        folder = run.saving(number) / "step-3"
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_text("x")
    (run.checkpoints / "step-2").mkdir()
    assert ledger.begin(run, facts("3"), lambda earlier: False)
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-2"]
    assert run.outlived(2) and not run.outlived(3)
