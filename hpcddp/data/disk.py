"""The node's own disk: where it is, and this user's folders there, which nobody else can enter."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hpcddp.errors import UserError

PLACES = ("SLURM_TMPDIR", "TMPDIR")  # the first that is there; else /tmp
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a disk says that takes no more


def place(environ: Mapping[str, str]) -> Path:
    """Where this node has room of its own. A login node's TMPDIR may not be here."""
    for name in PLACES:
        if (found := environ.get(name)) and Path(found).is_dir():
            return Path(found).absolute()
    return Path("/tmp")


def own_folder(environ: Mapping[str, str], what: str) -> Path:
    """This user's folder ``hpcddp-WHAT-UID``, of mode 0700.

    Raises:
        UserError: it cannot be made; or, as anybody can write in /tmp, it is somebody else's.
    """
    path = place(environ) / f"hpcddp-{what}-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise UserError(f"cannot be made: {error.strerror}", where=str(path),
                        hint="set TMPDIR to a folder on the node's own disk") from None  # fmt: skip
    own = facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    if not stat.S_ISDIR(facts.st_mode) or not own:
        raise UserError("is no folder of this user alone", where=str(path),
                        hint="remove it, or set TMPDIR to another folder")  # fmt: skip
    return path


def free(path: Path) -> tuple[int, int]:
    """Bytes that a user can still write on a path's disk, and bytes of the whole disk."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
