"""Step 8 of a program that starts a launcher: torchrun, srun or mpirun in each rank.

    python -P -m hpcddp.launch.inner_world LAUNCHER COMMAND...

``hpcddp.gloo`` starts it where a rank's program is such a launcher, or runs under one. Each rank
would have a world of its own, and train a copy. If all ranks do this before they have reached the
rendezvous, the attempt ends as a user error. One rank alone may evaluate or prepare something in
that way: it goes on.

Exit codes: ENDS, the attempt ends; 0, the launcher may go on.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcddp import record
from hpcddp.attempt import exit_codes
from hpcddp.attempt.error_record import is_shared, report
from hpcddp.attempt.rank_exit import share_failure
from hpcddp.errors import HpcddpError, UserError
from hpcddp.gloo import ENDS, WORLD
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir

LATE = 20.0  # seconds between the first and the last rank that start one: they import torch first


def main(args: list[str]) -> int:
    """Compare with the other ranks; report the error if all of them start a launcher."""
    launcher, *command = args
    rank, size = (int(word) for word in os.environ[WORLD].split(";")[:2])
    run = RunDir(os.environ["HPCDDP_RUN_DIR"])
    folder = run.attempt(int(os.environ["HPCDDP_ATTEMPT"]))
    if folder.met.exists():
        return exit_codes.DONE
    error = refusal(record.read(run), launcher, size, command)
    share_failure(error, folder, rank, size, LATE)
    if not is_shared(folder):
        return exit_codes.DONE
    print(report(error, folder, None), file=sys.stderr, flush=True)
    return ENDS


def refusal(job: JobRecord, launcher: str, size: int, command: Sequence[str]) -> UserError:
    """The error of a launcher that starts in each rank, with the command that does the same."""
    low, high = job.nodes
    nodes = str(low) if low == high else f"{low}-{high}"
    instead = f"hpcddp submit --nodes {nodes} --gpus {job.gpus_per_node} -- {plain(command)}"
    return UserError(
        f"{launcher} starts processes of its own in each of the {size} ranks",
        where="command",
        hint=f"each rank runs the command itself; leave {launcher} out: {instead}",
    )


def plain(command: Sequence[str]) -> str:
    """A command as a person would type it: torchrun adds Python's path and `-u`."""
    program, *words = command
    if Path(program).name.startswith("python"):
        program = "python"
        words = words[1:] if words[:1] == ["-u"] else words
    return shlex.join([program, *words])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (HpcddpError, OSError):  # a run folder that does not answer now is no reason to end
        sys.exit(exit_codes.DONE)
