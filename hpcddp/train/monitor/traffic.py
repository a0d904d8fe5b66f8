"""Counts the bytes that this rank sends to others (``train.measure``), from the kernel."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

FDS = Path("/proc/self/fd")
# tcp_info of linux/tcp.h, from Linux 4.19 on: tcpi_bytes_sent and tcpi_bytes_retrans.
SENT = struct.Struct("=200xQQ")


class Traffic:
    """Bytes through this process's TCP sockets since the last reading, loopback included.

    These are all bytes of gloo, and a few for the ranks' store. The kernel does not count the
    traffic of NCCL.

    Args:
        backend: the backend of the process group.
    """

    def __init__(self, backend: str) -> None:
        self._known = backend == "gloo"
        self._seen = self._look()
        self._counted = 0

    def take(self) -> float:
        """Bytes since the last call; nan if unknown."""
        self._count()
        counted, self._counted = self._counted, 0
        return counted if self._known else math.nan

    def forget(self) -> None:
        """Restart the count."""
        self._seen, self._counted = self._look(), 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count bytes that are sent within."""
        self._count()
        yield
        self._seen = self._look()

    def _count(self) -> None:
        now = self._look()
        self._counted += sum(sent - self._seen.get(name, 0) for name, sent in now.items())
        self._seen = now

    def _look(self) -> dict[str, int]:
        """Bytes that each open socket has sent."""
        try:
            return dict(_sockets()) if self._known else {}
        except (OSError, NotImplementedError):
            self._known = False
            return {}


def _sockets() -> Iterator[tuple[str, int]]:
    """Name and sent bytes, without retransmissions, of each TCP socket of this process.

    Raises:
        OSError: the system is not Linux.
        NotImplementedError: the kernel is too old.
    """
    for link in FDS.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or not TCP
            name = str(link.readlink())
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as same:
                info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SENT.size)
            if len(info) < SENT.size:
                raise NotImplementedError
            sent, again = SENT.unpack(info)
            yield name, sent - again
