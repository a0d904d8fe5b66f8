"""Attempts in a run dir, as their scripts leave them."""

import os
import socket
from dataclasses import asdict, replace
from typing import Any

from sites import Site, record_run

from hpcddp import processes
from hpcddp.attempt import ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir, write_json

MISTAKE = {"rank": 1, "host": "n1", "type": "ImportError", "kind": "mistake", "message": "no x"}


def earlier(run: RunDir, **given: Any) -> None:
    """An attempt that has not said that it ended."""
    facts: dict[str, Any] = {
        "number": 0, "job_id": "6", "host": socket.gethostname(), "pid": os.getpid(),
        "pid_start": processes.start_of(os.getpid()), "slurm": False, "nodes": "", "began": 1.0,
    }  # fmt: skip
    assert ledger.begin(run, Attempt(**facts | given), lambda earlier: False)


def failing(site: Site, **spec: Any) -> tuple[RunDir, ledger.Attempt]:
    """A run of two nodes with two ranks each, whose first attempt has failed."""
    run = RunDir(site.runs / "toy-1")
    run.create()
    record_run(run, (2, 2), 2, backend="local", spec=spec)
    write_json(run.submission, {"submitted": 5.0})
    return run, attempted(run, 1)


def attempted(run: RunDir, number: int, *, met: bool = False, **given: Any) -> ledger.Attempt:
    mine = replace(ledger.new_attempt("7", 1), number=number, **given)
    run.attempt(number).path.mkdir(parents=True)
    write_json(run.attempt(number).facts, asdict(mine))
    if met:
        run.attempt(number).metrics.write_text('{"event": "ranks"}\n')
    return mine
