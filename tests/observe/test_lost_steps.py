"""Why steps are lost: told by `why`, and no reason where nothing is lost."""

import json
from pathlib import Path

import pytest
from local_runs import Command
from made import made_run

from hpcddp import record
from hpcddp.observe import lost_steps
from hpcddp.rundir import RunDir


def crashed(folder: Path, strategy: str, **job: object) -> RunDir:
    """A run whose first attempt crashed at step 120, where 100 was saved."""
    run = made_run(folder, ends=((120, 100, "crash"),))
    made = record.read(run)
    for name, value in job.items():
        setattr(made, name, value)
    record.write(run, made)
    start = {"event": "start", "step": 0, "time": 1.0, "strategy": strategy}
    run.attempt(1).metrics.write_text(json.dumps(start) + "\n")
    return run


@pytest.mark.parametrize(
    ("strategy", "job", "reason"),
    [
        ("ddp=4", {"launcher": "srun"}, "with the launcher srun"),
        ("ddp=4", {"launcher": "fork", "backend": "local"}, "on one machine"),
        ("ddp=4", {"launcher": "fork", "container": {"runtime": "ch-run"}}, "no rank that was"),
        ("fsdp=4", {"launcher": "fork"}, "with the strategy fsdp=4"),
        ("ddp=1,fsdp=4", {"launcher": "fork"}, "with the strategy ddp=1,fsdp=4"),
        ("ddp=2,fsdp=2", {"launcher": "fork"}, "no rank that was left"),
        ("", {"launcher": "fork"}, "no rank that was left"),  # an attached loop
    ],
)
def test_lost_steps_have_a_reason(
    tmp_path: Path, strategy: str, job: dict[str, object], reason: str
) -> None:
    run = crashed(tmp_path, strategy, **{"backend": "slurm", **job})
    assert lost_steps.why(run, 1, "crash", 20).startswith(reason)


def test_no_lost_step_and_no_failure_has_one(tmp_path: Path) -> None:
    run = crashed(tmp_path, "fsdp=4", backend="slurm", launcher="fork")
    assert lost_steps.why(run, 1, "crash", 0) == lost_steps.why(run, 1, "preempted", 20) == ""
    assert lost_steps.why(run, 1, None, 20) == lost_steps.why(run, 1, "unheard of", 20) == ""


def test_why_tells_it(tmp_path: Path, command: Command) -> None:
    run = crashed(tmp_path / "runs", "fsdp=4", backend="slurm", launcher="fork")
    said = command("why", str(run.path)).out
    assert (
        "attempt 1: steps lost: with the strategy fsdp=4, no other rank has the same state" in said
    )
