"""Becomes a program with a host name, a /dev/shm and a /tmp of its own, as on a machine of its own.

    python -I as_machine.py HOSTNAME COMMAND...

What is in these folders goes with the processes. The folders that lie in /tmp at the start stay
shared: runs may be there, and this very sandbox. Some containers forbid mounts: then the program
has the folders of this machine. (unshare(2), mount(2), mount_namespaces(7))
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from pathlib import Path

NEW_MOUNTS, NEW_NAME = 0x00020000, 0x04000000  # of unshare(2)
BIND, RECURSIVE, SLAVE, LAZY = 1 << 12, 1 << 14, 1 << 19, 2  # of mount(2) and umount2(2)
MEMORY, SHARED = Path("/dev/shm"), Path("/tmp")

_libc = ctypes.CDLL(None, use_errno=True)


def main(hostname: str, *command: str) -> None:
    """Become the program.

    Raises:
        OSError: the host name cannot be set, or the program cannot be started.
    """
    _done(_libc.unshare(NEW_NAME))
    socket.sethostname(hostname)
    with contextlib.suppress(OSError):
        _own_folders()
    os.execvp(command[0], command)


def _own_folders() -> None:
    """Mount the folders; nothing is changed if that is forbidden."""
    _done(_libc.unshare(NEW_MOUNTS))
    _mount("none", Path("/"), RECURSIVE | SLAVE)  # what is mounted outside later is seen here
    _mount("tmpfs", MEMORY)
    old = MEMORY / "old"
    old.mkdir()
    _mount(str(SHARED), old, BIND | RECURSIVE)
    _mount("tmpfs", SHARED)
    for folder in old.iterdir():
        with contextlib.suppress(OSError):  # it is being removed
            if folder.is_dir() and not folder.is_symlink():
                new = SHARED / folder.name
                new.mkdir()
                _mount(str(folder), new, BIND | RECURSIVE)
    _done(_libc.umount2(bytes(old), LAZY))
    old.rmdir()


def _mount(source: str, target: Path, flags: int = 0) -> None:
    kind, data = (b"tmpfs", b"mode=1777") if source == "tmpfs" else (None, None)
    _done(_libc.mount(os.fsencode(source), bytes(target), kind, ctypes.c_ulong(flags), data))


def _done(result: int) -> None:
    """Raise the error of a call of the system."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
