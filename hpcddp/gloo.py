"""In every process that imports torch: gloo's threads, a world in a rank, and its stack on request.

torch calls ``watch_over`` when it is imported (entry point ``torch.backends``, which torch 2.5 and
later look for), so a job's scripts need no line for it where hpcddp is installed beside torch.

gloo's threads must not outlive Python. A thread of gloo releases a collective's tensors after the
wait for it has returned. If it holds the last reference to a Python tensor while Python ends, it
cannot take Python's lock any more, and the process dies of SIGABRT ("terminate called without an
active exception", torch 2.13, ProcessGroupGloo::runLoop): a script that has finished would count
as a crash. Ending the process group joins the threads, but few scripts end it, and after a
DistributedDataParallel the threads are joined only if nothing refers to the group any more.

A launcher such as torchrun or srun that starts in each rank makes a world of its own there: as many
trainings as ranks, none of them the one that was asked for. launch/inner_world.py ends such an
attempt; this module only notices the launcher.

A rank of a program answers the request of `hpcddp stacks` (stacks/answer.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcddp.topology import Rank

NAME = "pt_gloo_runloop"
QUIET = 3  # consecutive looks that find all threads asleep
LIMIT = 1.0  # seconds

WORLD = "HPCDDP_WORLD"  # rank and world size of a job's program, then the values of WORLDS
# What srun and mpirun set anew in each world: variable -> their name, and where the size is.
WORLDS = {
    "SLURM_STEP_ID": ("srun", "SLURM_STEP_NUM_TASKS"),
    "PMIX_NAMESPACE": ("mpirun", "OMPI_COMM_WORLD_SIZE"),
    "PMI_SIZE": ("mpirun", "PMI_SIZE"),
}
# Programs and modules that start ranks through torch's elastic agent.
PROGRAMS = {"torchrun", "accelerate", "accelerate-launch", "fabric"}
MODULES = {
    "torch.distributed.run", "torch.distributed.launch",
    "accelerate.commands.launch", "accelerate.commands.accelerate_cli",
}  # fmt: skip
AGENT = "torch.distributed.launcher.api"
ENDS = 90  # the exit code by which inner_world.py ends a rank; that of a traceback is 1


def watch_over() -> None:
    """Do all three, in a process of a job."""
    if "HPCDDP_RUN_DIR" in os.environ:
        atexit.register(rest)
        if "RANK" in os.environ:
            from hpcddp.stacks.answer import answer  # no process outside of a job needs it

            answer(os.environ)
        if WORLD in os.environ:
            with contextlib.suppress(Exception):  # a program that is right must not fail of this
                look_for_world(os.environ)


def rest() -> None:
    """Wait, before Python ends, until gloo's threads are idle.

    They sleep for lack of work or for Python's lock; while this function sleeps, they can take it.
    """
    end, quiet = time.monotonic() + LIMIT, 0
    while quiet < QUIET and time.monotonic() < end:
        states = list(_states())
        if not states:
            return
        quiet = quiet + 1 if set(states) == {"S"} else 0
        time.sleep(0.001)


def _states() -> Iterator[str]:
    """The state of each of gloo's threads (proc(5), /proc/pid/stat)."""
    from pathlib import Path  # a rank that waits for this module does not need it

    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            words, _, state = path.read_text().rpartition(") ")
        except OSError:  # the thread has ended
            continue
        if words.endswith(NAME):
            yield state[0]


def world(rank: Rank, environ: Mapping[str, str]) -> str:
    """The value of WORLD for a rank of a program."""
    facts = (rank.world_rank, rank.world_size, *(environ.get(name, "") for name in WORLDS))
    return ";".join(map(str, facts))


def look_for_world(environ: Mapping[str, str]) -> None:
    """Notice a launcher that this process is, or that has started it, inside a rank."""
    _, size, *outer = environ[WORLD].split(";")
    if size == "1":  # then its world is the only one
        return
    for (name, (launcher, count)), before in zip(WORLDS.items(), outer, strict=True):
        if environ.get(name, before) != before and environ.get(count, "1") != "1":
            ask(launcher, sys.orig_argv)
            return
    if launcher := own_launcher(sys.argv, sys.orig_argv):
        guard_agent(launcher, int(size))


def own_launcher(argv: Sequence[str], whole: Sequence[str]) -> str:
    """The launcher that this process is, if any.

    Args:
        argv: sys.argv: of `python -m MODULE` the first word is `-m` until the module runs.
        whole: sys.orig_argv, which has the name of the module then.
    """
    name = "".join(argv[:1]).rpartition("/")[2]
    if name == "-m":
        name = whole[-len(argv)].removeprefix("-m")
    return name if name in PROGRAMS or name in MODULES else ""


def guard_agent(launcher: str, size: int) -> None:
    """Ask before torch's agent starts processes here, unless it is one of `size` agents that form
    one world together: then each rank is a node of theirs."""
    agent = import_module(AGENT)
    start = agent.launch_agent

    def launch_agent(config: Any, entrypoint: Any, args: Any, *more: Any, **named: Any) -> Any:
        if config.max_nodes != size and isinstance(entrypoint, str):
            ask(launcher, [entrypoint, *args])
        return start(config, entrypoint, args, *more, **named)

    agent.launch_agent = launch_agent  # type: ignore[attr-defined]


def ask(launcher: str, command: Sequence[str]) -> None:
    """Ask inner_world.py in a process of its own, which may wait for the other ranks; end this
    process where it says so."""
    import subprocess

    words = [sys.executable, "-P", "-m", "hpcddp.launch.inner_world", launcher, *command]
    if subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode == ENDS:
        sys.stdout.flush()
        os._exit(1)
