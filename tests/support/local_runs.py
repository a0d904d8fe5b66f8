"""Whole runs on this machine, and what becomes of their processes."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sites import Outcome, Site
from toy import TOY

from hpcddp.submit import status as run_status
from hpcddp.submit import submission

Command = Callable[..., Outcome]

PATIENCE = 240  # seconds: two cores, four ranks, and each imports a framework

OVER = 50  # looks at a run that has ended, which a `resume` may yet begin again


@pytest.fixture
def toy(site: Site, command: Command) -> Iterator[Site]:
    site.job("toy", "global_batch = 8\nmax_steps = 12\n", TOY)
    yield site
    end_all(site)


def end_all(site: Site) -> None:
    """End what still runs, by the id of its session."""
    for path in site.runs.glob("*/submission.json"):
        job_id = json.loads(path.read_text())["job_id"]
        attempt = path.parent / "attempts/1/attempt.json"
        if not attempt.exists() or not json.loads(attempt.read_text())["cause"]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(job_id), signal.SIGKILL)


def status(command: Command) -> dict[str, Any]:
    """That of the last run, in this process: a command for each look takes time from the ranks."""
    return run_status.status(submission.find(Path("runs").absolute(), "last")).to_dict()


def until(command: Command, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline, over = time.monotonic() + PATIENCE, 0
    while time.monotonic() < deadline and over < OVER:
        found = status(command)
        if good(found):
            return found
        over = over + 1 if found["state"] in ("COMPLETED", "FAILED", "CANCELLED") else 0
        time.sleep(0.3)
    raise AssertionError(f"never so: {found}\n{command('logs').text}")


def alive(group: str) -> list[str]:
    """The processes of a group that have not ended (proc(5), stat)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, pgrp = rest.split()[:3]
            if pgrp == group and state != "Z":
                found.append(name)
    return found
