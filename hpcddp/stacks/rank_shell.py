"""A shell beside a rank, on its node: with its variables, in its folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hpcddp.errors import RunError
from hpcddp.stacks.answer import SHELL
from hpcddp.stacks.rank_processes import ranks_here, this_node

# Of the terminal, and not of the rank.
TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES")
# What a container runtime sets inside: an inner one would take it for its own.
INNER = {"CH_RUNNING", "PATH"} | {
    f"{program}_{name}" for program in ("APPTAINER", "SINGULARITY")
    for name in ("APPNAME", "BIND", "COMMAND", "CONTAINER", "ENVIRONMENT", "NAME")
}  # fmt: skip
# In an image, the best shell that it has.
INSIDE = 'exec "$(command -v bash || echo sh)"'


def become(run_dir: str, attempt: int, rank: int, container: Sequence[str] = ()) -> NoReturn:
    """Replace this process by a shell in the environment of a rank.

    Args:
        container: the words before a command that enter the rank's container; empty without one.

    Raises:
        RunError: no process of the rank runs here, or its shell does not start.
    """
    process = ranks_here(run_dir, attempt).get(rank)
    host = this_node()
    if process is None:
        hint = "it is starting or has ended; try again, or name another rank with --rank"
        raise RunError(f"no process of rank {rank} on {host}", where=run_dir, hint=hint)
    own = {name: os.environ[name] for name in TERMINAL if name in os.environ}
    environ = {**process.environment(), **own, SHELL: "1"}
    shell = environ.get("SHELL") or "/bin/bash"
    words = [shell]
    if container:
        path = _path(process.pid, container[0])
        shell = shutil.which(container[0], path=path) or container[0]
        words = [*container, "/bin/sh", "-c", INSIDE]
        environ = _outside(environ) | {"PATH": path}
    try:
        if not container:  # its words name the folder
            os.chdir(f"/proc/{process.pid}/cwd")
            os.chdir(Path.cwd())
        if sys.stdin.isatty():
            where = container[0] if container else Path.cwd()
            text = f"rank {rank} on {host}, process {process.pid}, in {where}; `exit` leaves"
            print(f"hpcddp: {text}", file=sys.stderr, flush=True)
        os.execve(shell, words, environ)
    except OSError as error:
        what = f"cannot start {shell} on {host}: {error.strerror}"
        hint = "set SHELL for the job: --env SHELL=/bin/bash"
        hint = "the node lacks the container runtime" if container else hint
        raise RunError(what, where=run_dir, hint=hint) from None


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank in a container as the runtime takes them on the host."""
    return {name: value for name, value in environ.items()
            if name not in INNER and not name.startswith("LD_")}  # fmt: skip


def _path(pid: int, program: str) -> str:
    """The PATH of the newest ancestor of a process that finds a program with it: the job may have
    loaded it as a module."""
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            break
        own = next((word[5:].decode() for word in words if word.startswith(b"PATH=")), "")
        if own and shutil.which(program, path=own):
            return own
        pid = int(stat.rpartition(")")[2].split()[1])
    return os.environ.get("PATH", os.defpath)
