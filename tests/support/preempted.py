"""A script has itself preempted or stopped at steps that it is told: no look from outside is as
exact.

PREEMPT_AT=2,14 is after step 2 in the first attempt, and after step 14 in the second; STOP_AT too.
"""

import os
import subprocess
import sys
import time

from hpcddp.train.loop import Run


def after(run: Run) -> None:
    """Ask where it is the turn. Returns on each rank when the signal has come there: this step is
    the last, or one of the next two."""
    attempt = int(os.environ.get("HPCDDP_ATTEMPT", "1"))
    for verb in ("preempt", "stop"):
        told = os.environ.get(f"{verb.upper()}_AT", "").split(",")
        if told[attempt - 1 : attempt] == [str(run.steps)]:
            _ask(run, verb)


def _ask(run: Run, verb: str) -> None:
    if run.world.is_main:
        command = [sys.executable, "-m", "hpcddp", verb, os.environ["HPCDDP_RUN_DIR"]]
        subprocess.run(command, check=True)
    while not run._preemption.requested:
        time.sleep(0.01)
