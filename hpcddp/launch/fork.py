"""The launcher `fork`: one process per node imports torch and forks the node's ranks.

    python -P -m hpcddp.launch.fork RANKS_PER_NODE COMMAND...

srun or spawn.py starts it once per node. Before the fork there are only imports: a CUDA context, a
thread or a parallel region of OpenMP would be broken in the ranks. If an import has opened a GPU,
each rank starts in a Python of its own. The command is a Python script or `-m MODULE`, which runs
in the forked process as `__main__`. Labels, signals and exit code are as in spawn.py.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from hpcddp.launch import core_shares
from hpcddp.launch.children import KILL_WAIT, Group, patience
from hpcddp.launch.command import job_of
from hpcddp.launch.imports import preload
from hpcddp.launch.script import Script
from hpcddp.preempt import ignore_stop_signals, stop_signals
from hpcddp.processes import adopt_orphans, die_with_parent, with_room
from hpcddp.topology import Rank, Topology

GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")  # device files of NVIDIA's and AMD's GPUs
SLURM_KILL_WAIT = 30.0  # seconds between TERM and KILL, Slurm's default


class Forked:
    """A forked rank, with the interface that Group uses."""

    def __init__(self, pid: int, output: int) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = io.FileIO(output)
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, -N for signal N; None while it runs."""
        if self._code is None:
            with suppress(ChildProcessError):  # a signal handler has read the code
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)


class Born(BaseException):
    """Raised in a forked process, to unwind the frames of its parent."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank


def start(rank: Rank) -> Forked:
    """Fork a rank. Signals are blocked: the child must not handle those for its parent."""
    output, end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(end)
        return Forked(pid, output)
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (end, 1), (end, 2)):
        os.dup2(old, new)
    for own in (output, end, null):
        os.close(own)
    raise Born(rank)


def environment(rank: Rank, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank in place of its node's: those of torchrun, and those that srun would
    have set."""
    variables = {**rank.to_env(), "HPCDDP_FORKED": "1"}
    nodes = rank.world_size // rank.local_size
    each = f"{rank.local_size}(x{nodes})" if nodes > 1 else str(rank.local_size)
    slurm = {
        "SLURM_PROCID": rank.world_rank,
        "SLURM_LOCALID": rank.local_rank,
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), rank.world_size),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), each),
        "SLURM_NTASKS_PER_NODE": rank.local_size,
        "SLURM_TASK_PID": os.getpid(),
        "SLURM_NODEID": rank.node,
        # Of an allocation with spares, not all nodes have ranks.
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), nodes),
    }
    if (cpus := environ.get("SLURM_CPUS_PER_TASK", "")).isdigit():
        slurm["SLURM_CPUS_PER_TASK"] = int(cpus) // rank.local_size
    return variables | {name: str(value) for name, value in slurm.items() if name in environ}


def open_gpu(descriptors: Path = Path("/proc/self/fd")) -> str:
    """A GPU's device file that this process has open, as a forked process could not use that GPU;
    "" if there is none. Each use of CUDA or ROCm leaves one open (proc(5), fd). It is printed."""
    for link in descriptors.iterdir():
        with suppress(OSError):  # that of this very look
            if (device := str(link.readlink())).startswith(GPUS):
                text = f"hpcddp: an import has opened {device}: each rank imports torch itself"
                print(text, flush=True)
                return device
    return ""


def run(script: Script, command: list[str], device: str) -> NoReturn:
    """Run the command in a forked process; in a new Python if its parent has opened a GPU."""
    if device:
        del os.environ["HPCDDP_FORKED"]
        os.execvp(command[0], command)
    script.run()


def main(args: list[str]) -> int:
    """Import, fork the node's ranks, and wait for them."""
    here, *command = args
    script = Script(command)
    node = Rank.from_env(os.environ)
    topology = Topology(node.world_size, int(here))
    os.environ.pop("RANK", None)  # this process is no rank, and answers for none
    preload(task=not job_of(os.environ["HPCDDP_RUN_DIR"]))
    adopt_orphans()
    device = open_gpu()
    ranks = [topology.rank_of(topology.rank(node.world_rank, i)) for i in range(int(here))]
    gc.collect()
    gc.freeze()  # the ranks share this memory until one writes to it
    signal.pthread_sigmask(signal.SIG_BLOCK, stops := {*stop_signals(), signal.SIGINT})
    try:
        wait = SLURM_KILL_WAIT if "SLURM_JOB_ID" in os.environ else KILL_WAIT
        out = io.FileIO(1, "w", closefd=False)
        group = Group(ranks, start, out, kill_wait=wait, wait=patience(os.environ))
    except Born as born:
        mine = born.rank
    else:
        for number in stops:
            signal.signal(number, lambda number, frame: group.signal(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        code = group.run()
        ignore_stop_signals()  # a signal during Python's exit would change the exit code
        return code
    be(mine)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    return run(script, command, device)


def be(rank: Rank) -> None:
    """Set up a forked process as if srun had started it."""
    os.environ.update(environment(rank, os.environ))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "numpy" in sys.modules:  # Python's own generator is seeded again by itself
        sys.modules["numpy"].random.seed()
    if shares := core_shares.shares(os.sched_getaffinity(0), rank.local_size):
        os.sched_setaffinity(0, shares[rank.local_rank])


if __name__ == "__main__":
    sys.exit(with_room(lambda: main(sys.argv[1:])))
