"""Processes that SIGKILL does not end, like one that waits in a driver or for a dead disk."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

DETACH, SEIZE = 17, 0x4206  # requests of ptrace(2)
TRACE_EXIT = 0x40  # its option that stops a process at its exit, also after SIGKILL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long] * 4
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    """Raises:
    OSError: the kernel refuses.
    """
    if _libc.ptrace(request, pid, 0, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def unkillable(pid: int) -> Iterator[None]:
    """Let a process not end until the block does; to be used in one thread."""
    _ptrace(SEIZE, pid, TRACE_EXIT)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it has not been killed
            _ptrace(DETACH, pid)
