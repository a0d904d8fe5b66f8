"""The launcher `spawn`: starts ranks on one machine, as srun does on a cluster.

    python -P -m hpcddp.launch.spawn [--no-label] NODES TASKS_PER_NODE COMMAND...

Starts nodes x tasks processes with their ranks in the environment, puts `RANK: ` before each line
of their output, ends the others when one fails, and exits with the first bad exit code. Nodes are
virtual: all processes run here. If the run folder holds a stop request, the ranks get USR2, as from
Slurm.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

from hpcddp.launch.children import Group, patience
from hpcddp.preempt import ignore_stop_signals
from hpcddp.processes import adopt_orphans
from hpcddp.topology import Rank, Topology


def main(args: list[str]) -> int:
    """Start the ranks; TERM and INT end them, USR2 is passed on."""
    label = args[0] != "--no-label"
    nodes, tasks, *command = args if label else args[1:]
    came: list[int] = []  # signals during the start, for the ranks that are not started yet
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: came.append(number))

    adopt_orphans()

    def start(rank: Rank) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env={**os.environ, **rank.to_env()}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    group = Group(
        list(Topology(int(nodes), int(tasks)).ranks()),
        start,
        io.FileIO(1, "w", closefd=False),  # unbuffered: lost lines must not raise at exit
        label=label,
        request=Path(os.environ.get("HPCDDP_RUN_DIR", os.devnull), "request.json"),
        wait=patience(os.environ),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: group.end())
    signal.signal(signal.SIGUSR2, lambda number, frame: group.signal(number))
    for early in came:  # USR2 ends a rank that has no handler yet, as under Slurm
        if early == signal.SIGUSR2:
            group.signal(early)
        else:
            group.end()
    code = group.run()
    ignore_stop_signals()  # a signal during Python's exit would change the exit code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
