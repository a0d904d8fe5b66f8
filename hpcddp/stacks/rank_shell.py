"""A shell beside a rank, on its node: with its variables, in its folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from hpcddp.errors import RunError
from hpcddp.stacks.answer import SHELL
from hpcddp.stacks.rank_processes import ranks_here, this_node

# Of the terminal, and not of the rank.
TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES")


def become(run_dir: str, attempt: int, rank: int) -> NoReturn:
    """Replace this process by a shell in the environment of a rank.

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
    try:
        os.chdir(f"/proc/{process.pid}/cwd")
        os.chdir(here := Path.cwd())
        if sys.stdin.isatty():
            text = f"rank {rank} on {host}, process {process.pid}, in {here}; `exit` leaves"
            print(f"hpcddp: {text}", file=sys.stderr, flush=True)
        os.execve(shell, [shell], environ)
    except OSError as error:
        what = f"cannot start {shell} on {host}: {error.strerror}"
        raise RunError(what, where=run_dir, hint="set SHELL for the job: --env SHELL=/bin/bash") \
            from None  # fmt: skip
