"""Preempt a job on the sandbox, and watch when it holds its nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.site import HPCDDP, Site, output
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir, read_lines

TASK = Path(__file__).with_name("heavy.py")
HOLDS = ("RUNNING", "COMPLETING")  # the states of a job that holds its nodes
POLL = 0.1  # seconds between two checks of the queue: the resolution of the figures
PATIENCE = 120.0  # seconds
# A job in the partition of higher priority that uses every node for a moment.
TAKER = ("sbatch", "--partition=high", "--exclusive", "--nodes=2", "--wrap=sleep 1",
         "--output=/dev/null")  # fmt: skip


def submit(site: Site, **keys: Any) -> tuple[str, RunDir]:
    """Submit hpcddp's job on 2 x 2 ranks, with one sample per rank; return job id and run."""
    folder = site.fresh()
    (folder / "jobs").mkdir()
    (folder / "jobs/heavy.py").write_text(TASK.read_text())
    (folder / "jobs/heavy.toml").write_text("global_batch = 4\n")
    words = [word for k, v in keys.items() for word in ("--set", f"{k.replace('__', '.')}={v}")]
    command = [HPCDDP, "submit", "heavy", "--nodes", "2", "--gpus", "2", "--detach", "--json"]
    said = json.loads(output([*command, *words], site.slurm, folder))
    return said["job_id"], RunDir(said["path"])


def take_nodes(site: Site) -> None:
    """Submit the job that preempts others."""
    site.slurm_says(*TAKER)


def state(site: Site, job_id: str) -> str:
    """A job's state, as squeue prints it."""
    return site.slurm_says(
        "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job_id}"
    )


def until(what: str, holds: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Wait until a function returns a true value, and return it; HpcddpError after a time limit."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise HpcddpError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(POLL)
    return found


def records(run: RunDir, attempt: int, event: str) -> list[dict[str, Any]]:
    """An attempt's records of one kind."""
    return [r for r in read_lines(run.attempt(attempt).metrics) if r["event"] == event]
