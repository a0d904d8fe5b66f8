"""A written checkpoint appears under its name, whole, and old ones go.

Names in ``checkpoints/`` that begin with a dot:

    .saving-N/       what attempt N writes, ``step-S`` inside; published by renaming
    .step-S.old/     a step-S being replaced, where the file system cannot exchange two names
    .gone-*/         on its way out
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path
from typing import Any

from hpcddp.rundir import remove, sweep, write_json
from hpcddp.train.checkpoint import COMPLETE, FORMAT, META, complete, digest, old, step_of

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)


def mark(aside: Path, files: dict[str, dict[str, Any]], meta: dict[str, Any]) -> int:
    """Finish a folder that holds all tensors: meta.json, then COMPLETE, all of it on disk.

    Args:
        files: the ranks' files, as ``digest`` gives them.

    Returns: its size in bytes, without COMPLETE.
    """
    from hpcddp.train import shards

    write_json(aside / META, {"format": FORMAT, **meta})
    named = {**files, **{name: digest(aside / name) for name in (META, shards.METADATA)}}
    write_json(aside / COMPLETE, {"format": FORMAT, "files": named})
    _fsync(aside)
    return sum(entry["size"] for entry in named.values())


def publish(aside: Path, target: Path) -> None:
    """Rename a marked folder to its name. One that has the name is replaced.

    At every instant the one or the other is there whole, and if `aside` is not there (a newer
    attempt has taken it away) nothing is changed.

    Raises:
        OSError: `aside` is not there, or the file system refuses.
    """
    if not target.exists():
        aside.rename(target)
    elif exchange(aside, target):
        sweep(aside)
    else:
        _replace(aside, target)
    _fsync(target.parent)


def _replace(aside: Path, target: Path) -> None:
    """In two renames. Between them, readers take the old one by its other name."""
    kept = old(target)
    if kept.exists():
        remove(kept)
    target.rename(kept)
    try:
        aside.rename(target)
    except OSError:
        with contextlib.suppress(OSError):
            kept.rename(target)
        raise
    remove(kept)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change their names in one instant (rename(2), RENAME_EXCHANGE).

    Returns: false where the system or the file system cannot do it.

    Raises:
        OSError: one of them is not there.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library without it
        return False
    if call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _fsync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def empty(folder: Path) -> None:
    """Remove what a folder holds; the folder stays.

    Raises:
        FileNotFoundError: it is not there.
    """
    for path in list(folder.iterdir()):
        shutil.rmtree(path, ignore_errors=True)


def tidy(checkpoints: Path) -> None:
    """Remove what was on its way out when an earlier life ended."""
    for path in checkpoints.glob(".gone-*"):
        sweep(path)
    whole = complete(checkpoints)
    for path in checkpoints.glob(".step-*"):
        if path not in whole:
            sweep(path)


def prune(checkpoints: Path, keep: int, best: int | None, passed: set[int]) -> None:
    """Keep the newest `keep` checkpoints and the best; rank 0 only.

    Args:
        passed: steps whose checkpoints were passed over: they go.
    """
    good = [path for path in complete(checkpoints) if step_of(path) not in passed]
    kept = {path for i, path in enumerate(good) if i < keep or step_of(path) == best}
    for path in checkpoints.glob("step-*"):
        if step_of(path) is not None and path not in kept:
            with contextlib.suppress(OSError):  # by its first rename it is no checkpoint any more
                remove(path)
    tidy(checkpoints)
