"""The parent of a node's ranks, which outlives their attempts.

    python -P -m hpcddp.launch.parent RANKS_PER_NODE COMMAND...

The supervisor (attempt/link/supervisor.py) starts it once per node with srun, and it lives as long
as the batch script works in the allocation. It imports torch, and forks the ranks of each attempt
that the supervisor orders (node_parent.py): the next attempt after a failure needs no import. If
the supervisor is gone, so is the batch script: the ranks get TERM, and the parent leaves.

HPCDDP_SUPERVISOR has the address, HPCDDP_SECRET the secret of the supervisor's socket.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from hpcddp.attempt import lost_script, sentry
from hpcddp.attempt.error_record import host
from hpcddp.attempt.link import channel
from hpcddp.attempt.link.parents import ADDRESS, HEARTBEAT, NODE, PARENT, PROTOCOL, SECRET
from hpcddp.launch import fork
from hpcddp.launch.command import job_of
from hpcddp.launch.imports import preload
from hpcddp.launch.node_parent import NodeParent
from hpcddp.launch.script import Script
from hpcddp.processes import adopt_orphans, with_room
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank


def main(args: list[str]) -> int:
    """Import torch, and serve; in a forked process: be a rank."""
    here, *command = args
    node = int(os.environ.pop(NODE, Rank.from_env(os.environ).world_rank))
    script = Script(command)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(PARENT)
    if "SLURM_JOB_ID" in os.environ:  # before the connection, which that process must not hold
        sentry.watch_node(os.environ["HPCDDP_RUN_DIR"], os.environ)
    attempt = int(os.environ.get("HPCDDP_ATTEMPT", "1"))
    where, secret = os.environ.pop(ADDRESS), os.environ.pop(SECRET)
    channel.hold(_place(secret, node))
    try:
        supervisor = channel.reach(where, secret)
    except OSError:
        _act_for_the_script(attempt, node)
        raise
    supervisor.send(hello=node, host=host(), pid=os.getpid(), protocol=PROTOCOL)
    os.environ.pop("RANK", None)  # this process is no rank, and answers for none
    parent = NodeParent(supervisor, node, int(here), float(os.environ.pop(HEARTBEAT, 0)))
    preload(task=not job_of(os.environ["HPCDDP_RUN_DIR"]))
    device = fork.open_gpu()
    adopt_orphans()
    mine: Rank | None = None  # of a forked process
    try:
        parent.serve()
    except fork.Born as born:
        mine = born.rank
    if mine:  # here, so that no exception of the script has that one as its context
        _be(mine, parent)
        return fork.run(script, command, device)
    if supervisor.closed and not parent.leaving and "SLURM_JOB_ID" in os.environ:
        _act_for_the_script(parent.newest, node)
    os._exit(0)  # at once: the end of the job waits for this process


def _place(secret: str, node: int) -> str:
    """The name that a node's parent holds, and with it its ranks. The parent of a node that is back
    after a silence waits until those before have ended: their GPUs are not free until then."""
    return f"hpcddp-{hashlib.sha256(f'{secret} {node}'.encode()).hexdigest()}"


def _be(rank: Rank, parent: NodeParent) -> None:
    """Set up a forked process: it is no parent, but a rank."""
    parent.supervisor.close()
    for number in parent.stops:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(Path(sys.executable).name)
    fork.be(rank)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, parent.stops)


def _act_for_the_script(attempt: int, node: int) -> None:
    """Without a supervisor, the script's node may be lost: have the job requeued, if so.

    Another process does that. This one stays until then, as Slurm may end all that a step leaves,
    but not longer: a requeued job waits for the end of its steps, and TERM then ends this process.
    The other one lives on, unless Slurm tracks processes by cgroup, and shortens the job's wait.

    It replaces itself by a small program, which holds neither torch nor a GPU nor the node's name:
    where only this node was silent, the job may use it as a spare.

    Args:
        attempt: the newest one, as far as this node knows: a newer one needs nothing of it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # one that comes now counts below
    for number in {*sentry.DEAF} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        words = lost_script.command(RunDir(os.environ["HPCDDP_RUN_DIR"]), attempt, node)
        null = subprocess.DEVNULL  # Slurm would wait for the end of the step's output
        env = lost_script.environment()
        acting = subprocess.Popen(
            words, stdin=null, stdout=null, stderr=null, start_new_session=True, env=env
        )
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        # For that one alone: orphans of the ranks are children of this process, too.
        program = f"import os; os.waitpid({acting.pid}, 0)"
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", program], env)


if __name__ == "__main__":
    sys.exit(with_room(lambda: main(sys.argv[1:])))
