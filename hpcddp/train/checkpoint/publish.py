"""A written checkpoint appears under its name, whole, and old ones go: those alone that are whole
themselves, and only when the new one was read back.

Names in ``checkpoints/`` that begin with a dot:

    .saving-N/       what attempt N writes, ``step-S`` inside; published by renaming
    .step-S.old/     a step-S being replaced, until the new one is read back
    .gone-*/         on its way out
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from hpcddp.attempt.fence import remove, sweep
from hpcddp.errors import CheckpointError
from hpcddp.rundir import step_of, token, write_json
from hpcddp.train.checkpoint import damage
from hpcddp.train.checkpoint.checkpoint import find, old, steps
from hpcddp.train.checkpoint.damage import COMPLETE, FORMAT, META, digest


def mark(aside: Path, files: dict[str, dict[str, Any]], meta: dict[str, Any]) -> int:
    """Finish a folder that holds all tensors: meta.json, then COMPLETE, all of it on disk.

    Args:
        files: the ranks' files, as ``digest`` gives them.

    Returns: its size in bytes, without COMPLETE.
    """
    from hpcddp.train.checkpoint import dcp_files

    write_json(aside / META, {"format": FORMAT, **meta})
    named = {**files, **{name: digest(aside / name) for name in (META, dcp_files.METADATA)}}
    mark = {"format": FORMAT, "attempt": meta["attempt"], "files": named}
    write_json(aside / COMPLETE, mark)
    _fsync(aside)
    return sum(entry["size"] for entry in named.values())


def publish(aside: Path, target: Path) -> None:
    """Rename a marked folder to its name, and read it back. One that has the name is replaced, and
    removed when that has gone well.

    At every instant the one or the other is there whole, and if `aside` is not there (a newer
    attempt has taken it away) nothing is changed.

    Raises:
        OSError: `aside` is not there, or the file system refuses.
        CheckpointError: the published files differ from the written ones.
    """
    kept = _make_way(target) if target.exists() else None
    try:
        aside.rename(target)
    except OSError:
        if kept:
            with contextlib.suppress(OSError):
                kept.rename(target)
        raise
    _fsync(target.parent)
    if wrong := damage.of_sizes(target):
        raise CheckpointError(f"written, but {wrong} when it is read back", where=str(target))
    if kept:
        with contextlib.suppress(OSError):  # `tidy` tries again
            remove(kept)


def _make_way(target: Path) -> Path | None:
    """Rename the checkpoint that has the name. A whole one is used under its other name until the
    new one is read back. A damaged or unreadable one is put aside for good: a person may know more
    of it.

    Returns: the folder that may be removed then.

    Raises:
        OSError: one of an earlier life has that other name, and may be the only whole one.
    """
    kept = old(target)
    try:
        whole = not damage.of_sizes(target)
    except OSError:
        whole = False
    if not whole:
        target.rename(target.with_name(f"damaged-{target.name}-{token(2)}"))
        return None
    if kept.exists():
        remove(kept)
    target.rename(kept)
    return kept


def _fsync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def empty(folder: Path) -> None:
    """Remove a folder's content; the folder stays.

    Raises:
        FileNotFoundError: it is not there.
    """
    for path in list(folder.iterdir()):
        shutil.rmtree(path, ignore_errors=True)


def tidy(checkpoints: Path) -> None:
    """Remove what was on its way out when an earlier life ended; rank 0 only."""
    with contextlib.suppress(OSError):  # one that cannot be judged stays
        for path in checkpoints.glob(".gone-*"):
            sweep(path)
        for path in checkpoints.glob(".step-*"):
            step = step_of(path)
            if step is not None and not damage.of_sizes(checkpoints / f"step-{step}"):
                remove(path)


def prune(checkpoints: Path, keep: int, best: int | None, passed: set[int]) -> None:
    """Of the whole checkpoints, keep the newest `keep` and the best; rank 0 only.

    A damaged or unreadable one stays: a person may know more of it.

    Args:
        passed: steps whose checkpoints were passed over: they stay too, and count for nothing.
    """
    whole: list[Path] = []
    with contextlib.suppress(OSError):
        for step in steps(checkpoints):
            if step not in passed:
                whole += _if_whole(checkpoints, step)
        for path in whole[keep:]:
            if step_of(path) != best:
                with contextlib.suppress(OSError):  # the next save tries again
                    remove(path)
        tidy(checkpoints)


def _if_whole(checkpoints: Path, step: int) -> list[Path]:
    with contextlib.suppress(OSError):
        path, wrong = find(checkpoints, step)
        return [] if wrong else [path]
    return []
