"""Trackers of a job: the process beside the ranks, and its successor in the next attempt."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_runs import Command, alive
from local_runs import toy as toy
from made import BEGAN
from sites import Site
from toy import TOY
from trackers_told import history, scalars, text
from trackers_told import made as made

from hpcddp.attempt import decision
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir, read_json, write_json


def ended(site: Site) -> RunDir:
    """Wait for the end of the only run's script: all metrics are sent then."""
    (run,) = map(RunDir, site.runs.iterdir())
    job = str((read_json(run.submission) or {})["job_id"])
    until = time.monotonic() + 60
    while alive(job):
        assert time.monotonic() < until
        time.sleep(0.1)
    return run


# Ranks that evaluate after a tracker has their first steps: its package is imported by then, even
# on a busy machine.
HELD = """
import os
_metrics = metrics
def metrics(output, target):
    until = time.monotonic() + 40
    while not os.path.exists(os.environ["HPCDDP_RUN_DIR"] + "/trackers.json"):
        assert time.monotonic() < until
        time.sleep(0.05)
    return _metrics(output, target)
"""


def test_a_job_tells_its_trackers_while_it_trains(toy: Site, command: Command) -> None:
    """One tracker fails: the log has a line, and the training continues."""
    broken = toy.write("broken/wandb/__init__.py", "raise RuntimeError('no wandb\\ntoday')\n")
    toy.job("toy", "global_batch = 8\nmax_steps = 12\n", TOY + HELD)
    renice = toy.write("bin/renice", "#!/bin/sh\n")  # next to other tests the minimum would be 0
    renice.chmod(0o755)
    trackers = 'metrics.trackers=["tensorboard", "wandb"]'
    done = command("submit", "--gpus", "2", "--set", trackers, "--set", "train.log_every=1",
                   PYTHONPATH=str(broken.parents[1]),
                   PATH=f"{renice.parent}:{os.environ['PATH']}")  # fmt: skip
    assert done.code == 0, done.text
    run = ended(toy)
    assert [step for step, _ in scalars(run, "loss")] == list(range(1, 13))
    assert scalars(run, "eval/accuracy")[-1][0] == 12
    assert "attempt 1 on" in text(run, "attempts") and ": done;" in text(run, "attempts")
    (line,) = [x for x in run.log.read_text().splitlines() if "cannot send to wandb" in x]
    assert "RuntimeError: no wandb today" in line and f"hpcddp track {run.name} --to wandb" in line


HANG = "import time\ntime.sleep(600)\n"


def test_a_program_is_told_of_too_and_a_tracker_that_hangs_is_left(
    site: Site, command: Command
) -> None:
    site.write("broken/mlflow/__init__.py", HANG)
    site.write("train.py", """
import hpcddp, json, os, time
run = os.environ["HPCDDP_RUN_DIR"]
with open(f"{run}/attempts/1/metrics.jsonl", "a") as f:
    for step in (1, 2, 3):
        print(json.dumps({"event": "train", "step": step, "loss": 1.0 / step}), file=f)
""")  # fmt: skip
    words = ("--set", "metrics.trackers=tensorboard mlflow", "--no-snapshot", "--")
    done = command("submit", "--gpus", "1", *words, sys.executable, "train.py",
                   PYTHONPATH=str(site.folder / "broken"))  # fmt: skip
    begun = time.monotonic()
    assert done.code == 0, done.text
    run = ended(site)
    assert time.monotonic() - begun < 40
    assert [step for step, _ in scalars(run, "loss")] == [1, 2, 3]
    assert "the trackers did not finish within" in run.log.read_text()


# The process that the script starts beside the ranks, with other time limits.
BESIDE = """
import sys
from hpcddp.trackers import __main__ as beside
beside.GRACE, beside.PAUSE = float(sys.argv[1]), 0.1
beside.main(sys.argv[2:])
"""


@pytest.fixture
def ranks() -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of the ranks, which ends on request."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def beside(
    run: RunDir, attempt: int, pid: int, name: str, grace: float = 60.0
) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", BESIDE, str(grace), str(run.path), str(attempt), str(pid), name]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def in_place_of(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Replace a tracker's package; return a file that exists after its import."""

    def put(tracker: str, code: str = "") -> Path:
        there = site.folder / "imported"
        site.write(f"broken/{tracker}/__init__.py", f"open({str(there)!r}, 'w').close()\n{code}")
        monkeypatch.setenv("PYTHONPATH", str(site.folder / "broken"))
        return there

    return put


def test_a_tracker_that_hangs_while_the_ranks_train_is_left_when_they_leave(
    made: Callable[..., RunDir], in_place_of: Callable[..., Path], ranks: subprocess.Popen[bytes]
) -> None:
    run = made(ends=(), cause=None, last=3)
    hangs = in_place_of("mlflow", HANG)
    with beside(run, 1, ranks.pid, "mlflow", grace=1.0) as process:
        while not hangs.exists() and process.poll() is None:
            time.sleep(0.05)
        ranks.communicate(b"\n")
        try:
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 1 and "the trackers did not finish within" in output


def test_what_tells_is_imported_while_the_ranks_start(
    made: Callable[..., RunDir], in_place_of: Callable[..., Path], ranks: subprocess.Popen[bytes]
) -> None:
    run = made(ends=(), cause=None, last=3)
    run.attempt(1).metrics.unlink()
    there = in_place_of("tensorboard")
    with beside(run, 1, ranks.pid, "tensorboard") as process:
        until = time.monotonic() + 60
        try:
            while not there.exists():
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
        finally:
            process.kill()


def test_an_attempt_that_a_newer_one_has_outlived_tells_nothing_more(
    made: Callable[..., RunDir], ranks: subprocess.Popen[bytes]
) -> None:
    run = made(cause=None, last=300)
    third = run.attempt(3).path.rename(run.path / "later")
    with beside(run, 2, ranks.pid, "tensorboard") as process:
        while not run.trackers.exists() and process.poll() is None:
            time.sleep(0.05)
        third.rename(run.attempt(3).path)
        try:
            output, _ = process.communicate(timeout=30)  # its ranks may still hang
        finally:
            process.kill()
    assert (process.returncode, output) == (0, "")
    assert scalars(run, "loss")[-1][0] < 270
    kept = run.trackers.read_bytes()
    with beside(run, 2, ranks.pid, "tensorboard") as process:
        assert process.wait(timeout=30) == 0
    assert run.trackers.read_bytes() == kept


def test_what_a_later_attempt_tells_of_the_last_step_is_not_lost(
    made: Callable[..., RunDir],
) -> None:
    """W&B accepts a step once: the evaluation that the next attempt repeats must be in it."""
    run = made(ends=((5, 5, "preempted"),), steps=8)
    second = run.attempt(2).path.rename(run.path / "later")
    facts = read_json(run.attempt(1).facts) or {}
    write_json(run.attempt(1).facts, facts | {"action": decision.AGAIN})
    with beside(run, 1, 0, "wandb") as process:
        assert process.communicate(timeout=60) == ("", None)
    assert [values["_step"] for _, values in history(run)] == [1, 2, 3, 4]
    second.rename(run.attempt(2).path)
    owed = {"event": "eval", "step": 5, "metrics": {"accuracy": 0.5}, "time": BEGAN}
    lines = run.attempt(2).metrics.read_text().splitlines(keepends=True)
    lines.insert(2, json.dumps(owed) + "\n")
    run.attempt(2).metrics.write_text("".join(lines))
    with beside(run, 2, 0, "wandb") as process:
        assert process.communicate(timeout=60) == ("", None)
    steps = [values for _, values in history(run)]
    assert [values["_step"] for values in steps] == list(range(1, 9))
    assert steps[4]["eval/accuracy"] == 0.5 and steps[4]["loss"] > 0


def test_a_script_tells_trackers_where_a_job_names_some(site: Site) -> None:
    layer = Layer()
    layer.put("metrics.trackers", ["mlflow"], "--set")
    run = RunDir(site.runs / "toy")
    script = site.plan(layer).render(run, ["true"])
    assert "readonly -a TRACKERS=(mlflow)" in script and "hpcddp.trackers" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    plain = site.plan().render(run, ["true"])
    assert "TRACKERS" not in plain and "hpcddp.trackers" not in plain
