"""The TCP connections of another process, and how much has passed over them."""

import contextlib
import ctypes
import os
import socket
import struct
from pathlib import Path

PIDFD_GETFD = 438  # number of the system call, on all platforms
DATA_SEGMENTS = 152  # where tcp_info (linux/tcp.h) has those that came and those that went

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def segments(pid: int) -> list[int]:
    """Segments with data that each TCP connection of a process has received and sent so far. A
    message of its own takes at least one where nothing is delayed (TCP_NODELAY)."""
    handle = os.pidfd_open(pid)
    try:
        return [count for path in Path(f"/proc/{pid}/fd").iterdir()
                if (count := _segments(handle, int(path.name))) is not None]  # fmt: skip
    finally:
        os.close(handle)


def _segments(handle: int, number: int) -> int | None:
    """Those of a descriptor; None if it is no TCP connection."""
    copy = _libc.syscall(PIDFD_GETFD, handle, number, 0)
    if copy < 0:
        return None
    try:
        end = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with end, contextlib.suppress(OSError):
        if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername():
            facts = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return sum(struct.unpack_from("2I", facts, DATA_SEGMENTS))
    return None
