"""A rank answers a signal with the stack of its main thread.

faulthandler handles the signal in C, also while the rank waits in a collective and another thread
holds Python's lock. It writes to a file in memory (memfd_create(2)), which stack_reader.py finds in
/proc: no disk has to answer, and no folder gets a file. The main thread handles the signal and
writes its own stack, as another thread's may change while it is read.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping

from hpcddp.processes import memory_file
from hpcddp.topology import Rank

SIGNAL = signal.SIGRTMIN + 5  # train/monitor/hang_report.py uses the one before
NAME = "hpcddp-stack"
ENVIRON = "hpcddp-environ"  # the memfd with the variables of a forked rank
SHELL = "HPCDDP_SHELL"  # set in a shell in the environment of a rank, which is no rank

_process = 0  # the process that answers; a forked child is another one


def answer(environ: Mapping[str, str]) -> None:
    """Answer from now on, in this process, if it is a rank; a program's own handler stays."""
    global _process
    if _process == os.getpid() or SHELL in environ:
        return
    with contextlib.suppress(Exception):  # no rank, or no memfd: the training works without it
        rank = Rank.from_env(environ)
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            _register(rank, environ.get("HPCDDP_ATTEMPT", "1"))
            _process = os.getpid()
            if "HPCDDP_FORKED" in environ:  # the kernel shows those of the process that forked it
                words = (f"{name}={value}" for name, value in environ.items())
                os.write(memory_file(ENVIRON), os.fsencode("\0".join(words)))


def _register(rank: Rank, attempt: str) -> None:
    import faulthandler
    import fcntl

    name = f"{NAME}-{rank.world_rank}-{rank.world_size}-{rank.local_size}-{attempt}"
    file = memory_file(name)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # a reader empties it
    faulthandler.register(SIGNAL, file, all_threads=False)
