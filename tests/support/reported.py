"""Runs that have much to report, and runs that have little."""

import json
from pathlib import Path
from typing import Any

from made import BEGAN, made_run
from sites import record_run

from hpcddp.observe.run_facts import static
from hpcddp.observe.viewer import Viewer
from hpcddp.rundir import RunDir, write_json

EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028&amp;"


def looked(run: RunDir) -> dict[str, Any]:
    return Viewer(run).look().to_dict() | static(run)


def spiky_run(folder: Path) -> RunDir:
    """A long run: of ten points of the loss nine are 1 and one is 11; the speed falls at times."""
    run = made_run(folder, "spiky", ends=(), steps=3000, slow=None)
    lines = [json.loads(line) for line in run.attempt(1).metrics.read_text().splitlines()]
    for told in lines:
        if told["event"] == "train":
            told["loss"] = 11.0 if told["step"] % 10 == 5 else 1.0
            told["samples_per_s"] = 4.0 if told["step"] % 3 == 0 else 64.0
    run.attempt(1).metrics.write_text("".join(json.dumps(told) + "\n" for told in lines))
    return run


def failed_run(folder: Path) -> RunDir:
    """A run of three attempts with three causes; the last one left an error."""
    ends = ((120, 120, "time limit"), (260, 250, "crashed"))
    run = made_run(folder, "failed", ends=ends, last=300, cause="crashed")
    traceback = "Traceback (most recent call last):\nRuntimeError: out of memory"
    error = {"rank": 1, "host": "n1", "type": "RuntimeError", "message": "out of memory"}
    write_json(run.attempt(3).error, error | {"traceback": traceback})
    return run


def unsubmitted_run(folder: Path) -> RunDir:
    """A run that was only rendered."""
    run = RunDir(folder / "rendered")
    run.create()
    record_run(run, spec={"name": "rendered"})
    return run


def started_run(folder: Path, name: str = "started", **spec: Any) -> RunDir:
    """A run that has its nodes, and no step yet."""
    run = made_run(folder, name, ends=(), last=1, cause=None, slow=None, **spec)
    attempt = run.attempt(1)
    lines = attempt.metrics.read_text().splitlines(keepends=True)
    attempt.metrics.write_text("".join(lines[:2]))  # the ranks and the start
    attempt.ranks.unlink()
    attempt.step.unlink()
    return run


def program_run(folder: Path) -> RunDir:
    """A program of a user's own, which records nothing."""
    run = started_run(folder, "program", command=["python", "train.py"])
    run.attempt(1).metrics.unlink()
    return run


def single_run(folder: Path) -> RunDir:
    """A run with one rank on one node."""
    run = made_run(folder, "single", ends=(), steps=40, slow=None, ranks=2)
    spec = {"name": "single", "task": "resnet.py"}
    record_run(run, (1, 1), 1, spec=spec, created=BEGAN - 30)
    for file in (run.attempt(1).metrics, run.attempt(1).ranks):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        ones = [{k: v[:1] if isinstance(v, list) else v for k, v in line.items()} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in ones))
    return run


def many_attempts(folder: Path, count: int = 100) -> RunDir:
    """A run that was interrupted each 20 steps, and had saved 10 steps before."""
    why = ["crashed", *["preempted"] * (count - 2)]
    ends = tuple((20 + 10 * i, 10 + 10 * i, cause) for i, cause in enumerate(why))
    return made_run(folder, "torn", ends=ends, steps=10 * count + 10, slow=None)
