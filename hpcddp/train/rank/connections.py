"""The TCP connections of a rank: to its peers, a store, or a tracker."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                mine.add(int(link.name))
    return mine


def shut(kept: set[int]) -> None:
    """Shut down the TCP connections of this process to other ranks.

    Args:
        kept: descriptors of others.
    """
    for descriptor in sockets() - kept:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.getpeername()  # fails for one that listens: gloo would abort the process
                sock.shutdown(socket.SHUT_RDWR)
