"""Sandbox: its processes. It starts them, finds them again, and ends only these.

A pid may be reused; a pid with its start time and its command line is unique. Signals go through a
pidfd, opened before these are compared, so that nothing can change in between.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcddp.attempt import sentry
from hpcddp.attempt.link.parents import PARENT
from hpcddp.errors import SandboxError

PROC = Path("/proc")


@dataclass(frozen=True)
class OwnProcess:
    pid: int
    started: int  # clock ticks since boot
    argv: tuple[str, ...]

    def alive(self) -> bool:
        stat = _stat(self.pid)
        if stat is None or stat.started != self.started:
            return False
        if stat.state == "Z":
            with suppress(ChildProcessError):  # a child of this Python: reap it
                os.waitpid(self.pid, os.WNOHANG)
            return False
        return _argv(self.pid) == self.argv


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    started: int


def start(
    argv: Sequence[str], environ: Mapping[str, str], output: Path, hostname: str = ""
) -> OwnProcess:
    """Start a daemon that outlives this Python, and wait until the program itself runs.

    Args:
        hostname: the host name that it sees, if it is to run as on a machine of its own.

    Raises:
        SandboxError: it cannot be started.
    """
    wrapper = [sys.executable, "-I", str(Path(__file__).with_name("as_machine.py")), hostname]
    command = [*wrapper, *argv] if hostname else list(argv)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(output), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    python_ignores = [signal.SIGPIPE, signal.SIGXFSZ]
    pid = os.posix_spawnp(
        command[0],
        command,
        dict(environ),
        file_actions=actions,
        setsid=True,
        setsigdef=python_ignores,
        setsigmask=[],
    )
    return _after_exec(pid, tuple(argv), output)


def _after_exec(pid: int, argv: tuple[str, ...], output: Path) -> OwnProcess:
    deadline = time.monotonic() + 10
    while (stat := _stat(pid)) is not None and stat.state != "Z":
        if _argv(pid) == argv:
            return OwnProcess(pid, stat.started, argv)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)  # a child of ours: its pid cannot have been reused yet
        time.sleep(0.002)
    os.waitpid(pid, 0)
    message = f"{argv[0]} did not start; its last lines follow"
    raise SandboxError(message, where=str(output), hint=tail(output))


def end(processes: Iterable[OwnProcess], sig: signal.Signals, seconds: float) -> list[OwnProcess]:
    """Signal processes and wait until they have ended; returns those that still run."""
    waiting: dict[int, OwnProcess] = {}
    try:
        for process in processes:
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(process.pid)
                waiting[handle] = process
                if process.alive():
                    signal.pidfd_send_signal(handle, sig)
        _wait(list(waiting), time.monotonic() + seconds)
    finally:
        for handle in waiting:
            os.close(handle)
    return [process for process in waiting.values() if process.alive()]


def send(processes: Iterable[OwnProcess], sig: signal.Signals) -> None:
    """Signal processes, without waiting for them."""
    end(processes, sig, 0.0)


def _wait(handles: list[int], deadline: float) -> None:
    """A pidfd is readable once its process has ended."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    left = set(handles)
    while left and (rest := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(rest * 1000):
            poll.unregister(handle)
            left.discard(handle)


def of_jobs(home: str, node: str = "") -> list[OwnProcess]:
    """The processes of jobs of the sandbox in this folder, with all their descendants.

    They are its step daemons, which hide their environment but keep their node's log open, and the
    processes with a SLURM_CONF from this folder and a SLURMD_NODENAME. A user's shell that uses the
    sandbox has no node name, and is not among them.

    Args:
        node: only processes of this node.
    """
    mark, named = f"SLURM_CONF={home}/".encode(), f"SLURMD_NODENAME={node}".encode()
    roots = []
    for pid in _pids():
        environ = _read(pid, "environ").split(b"\0")
        ours = any(entry.startswith(mark) for entry in environ)
        here = any(entry == named if node else entry.startswith(named) for entry in environ)
        if (ours and here) or _is_step_daemon(pid, home, node):
            roots.append(pid)
    return [*of_pids(roots), *descendants(roots)]


def of_steps(folder: str) -> list[OwnProcess]:
    """The tasks of a run's steps, by number, and the processes with their environment, except
    sentries and the parents of ranks."""
    mark, tasks = f"HPCDDP_RUN_DIR={folder}".encode(), []
    for pid in _pids():
        environ = _read(pid, "environ").split(b"\0")
        if _read(pid, "comm").strip() in (sentry.NAME.encode(), PARENT.encode()):
            continue
        if mark in environ and any(entry.startswith(b"SLURM_STEP_ID=") for entry in environ):
            tasks += [(int(e[13:]), pid) for e in environ if e.startswith(b"SLURM_PROCID=")]
    return of_pids(pid for _, pid in sorted(tasks))


def _is_step_daemon(pid: int, home: str, node: str) -> bool:
    if _read(pid, "comm") != b"slurmstepd\n":
        return False
    try:
        opened = [str(link.readlink()) for link in (PROC / str(pid) / "fd").iterdir()]
    except OSError:
        return False
    log = f"{home}/log/slurmd-{node}.log"
    return any(name == log if node else name.startswith(f"{home}/") for name in opened)


def descendants(roots: Iterable[int]) -> list[OwnProcess]:
    """Children, their children and so on, without the roots and without this Python."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        if (stat := _stat(pid)) is not None:
            children.setdefault(stat.parent, []).append(pid)
    pids: list[int] = []
    queue = list(roots)
    while queue:
        below = children.pop(queue.pop(), [])
        pids += below
        queue += below
    return of_pids(pids)


def tail(path: Path, lines: int = 8) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def of_pids(pids: Iterable[int]) -> list[OwnProcess]:
    """The processes with these pids that still run, without this Python."""
    stats = ((pid, _stat(pid)) for pid in pids if pid != os.getpid())
    return [OwnProcess(pid, stat.started, _argv(pid)) for pid, stat in stats if stat is not None]


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return b""


def _stat(pid: int) -> _Stat | None:
    # The name, in brackets, may hold spaces and brackets itself: count from the last one.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return _Stat(fields[0].decode(), int(fields[1]), int(fields[19])) if fields else None


def _argv(pid: int) -> tuple[str, ...]:
    return tuple(os.fsdecode(_read(pid, "cmdline")).rstrip("\0").split("\0"))
