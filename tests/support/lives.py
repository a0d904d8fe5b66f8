"""Attempts in a run dir, as their scripts leave them."""

import os
import socket
from typing import Any

from hpcddp import processes
from hpcddp.attempt import ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir


def earlier(run: RunDir, **given: Any) -> None:
    """An attempt that has not said that it ended."""
    facts: dict[str, Any] = {
        "number": 0, "job_id": "6", "host": socket.gethostname(), "pid": os.getpid(),
        "pid_start": processes.start_of(os.getpid()), "slurm": False, "nodes": "", "began": 1.0,
    }  # fmt: skip
    assert ledger.begin(run, Attempt(**facts | given), lambda earlier: False)
