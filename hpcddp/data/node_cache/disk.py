"""The node's own disk, and this user's private folders on it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from hpcddp import cgroups
from hpcddp.errors import UserError

MOUNTS = Path("/proc/self/mounts")
VARIABLES = ("SLURM_TMPDIR", "TMPDIR")  # the first that names an existing folder; else /tmp
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the errors of a full disk


def temporary(environ: Mapping[str, str]) -> Path:
    """This node's folder for temporary files. The login node's TMPDIR may not exist here."""
    for name in VARIABLES:
        if (folder := environ.get(name)) and Path(folder).is_dir():
            return Path(folder).absolute()
    return Path("/tmp")


def own_folder(environ: Mapping[str, str], purpose: str) -> Path:
    """This user's folder ``hpcddp-PURPOSE-UID``, of mode 0700.

    Raises:
        UserError: it cannot be made, or others can access it (anyone can make it in /tmp first).
    """
    path = temporary(environ) / f"hpcddp-{purpose}-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise UserError(f"cannot make the folder: {error.strerror}", where=str(path),
                        hint="set TMPDIR to a folder on the node's own disk") from None  # fmt: skip
    private = facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    if not stat.S_ISDIR(facts.st_mode) or not private:
        raise UserError("must be a folder that only you can access", where=str(path),
                        hint="remove it, or set TMPDIR to another folder")  # fmt: skip
    return path


def free(path: Path) -> tuple[int, int]:
    """Bytes that a user can still write on a path's disk, and the size of the disk in bytes.

    On a disk in memory the job's free memory is the limit.
    """
    facts = os.statvfs(path)
    left, whole = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    if in_memory(path):
        left = max(0, int(min(left, cgroups.memory_left())))
    return left, whole


def in_memory(path: Path) -> bool:
    """Whether a path's file system is in memory: tmpfs or ramfs (proc(5), mounts)."""
    return _kind(path.resolve()) in ("tmpfs", "ramfs")


@functools.cache
def _kind(path: Path) -> str:
    """The type of a path's file system."""
    best, kind = Path(), ""
    with contextlib.suppress(OSError):
        for line in os.fsdecode(MOUNTS.read_bytes()).splitlines():
            _, folder, name, *_ = line.split(" ")
            point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), folder))
            if path.is_relative_to(point) and len(point.parts) >= len(best.parts):
                best, kind = point, name
    return kind
