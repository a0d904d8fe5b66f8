"""Gives a complete checkpoint its name, then removes old ones: only undamaged ones, and only after
the new one was read back.

Names in ``checkpoints/`` that begin with a dot:

    .saving-N/       attempt N writes here, in ``step-S``; published by renaming. After a failure,
                     some ranks write alone, in ``replica-R``; files: attempt/link/own_decision.py
    .step-S.old/     a step-S being replaced, until the new one is read back
    .gone-*/         being removed
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

REPLICA = "replica-"  # the folder of a save of some ranks, with the number of the first one


def mark(aside: Path, files: dict[str, dict[str, Any]], meta: dict[str, Any]) -> int:
    """Finish a folder that holds the whole state: write meta.json, then COMPLETE, and fsync.

    Args:
        files: the ranks' files, as ``digest`` returns them.

    Returns: its size in bytes, without COMPLETE.
    """
    from hpcddp.train.checkpoint import dcp_files

    write_json(aside / META, {"format": FORMAT, **meta})
    index = () if meta.get("files") else (dcp_files.METADATA,)
    named = {**files, **{name: digest(aside / name) for name in (META, *index)}}
    mark = {"format": FORMAT, "attempt": meta["attempt"], "files": named}
    mark["gained"] = meta.get("gained", True)
    write_json(aside / COMPLETE, mark)
    _fsync(aside)
    return sum(entry["size"] for entry in named.values())


def publish(aside: Path, target: Path) -> None:
    """Rename a marked folder to its name, and read it back. An older one of that name is replaced,
    and removed after success.

    At every instant one of the two exists completely. If `aside` is missing (a newer attempt has
    removed it), nothing changes.

    Raises:
        OSError: `aside` is missing, or the file system fails.
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
        raise CheckpointError(f"reading it back failed: {wrong}", where=str(target))
    if kept:
        with contextlib.suppress(OSError):  # `tidy` tries again
            remove(kept)


def _make_way(target: Path) -> Path | None:
    """Rename the checkpoint that has the name. An undamaged one is used under its other name until
    the new one is read back. A damaged or unreadable one is kept under a new name for the user.

    Returns: the folder to remove afterwards, if any.

    Raises:
        OSError: one of an earlier attempt has that other name, and may be the only undamaged one.
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
    """Remove the folders in a folder, but for what some of the ranks write alone.

    Raises:
        FileNotFoundError: the folder is missing.
    """
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.name.startswith(REPLICA):
            shutil.rmtree(path, ignore_errors=True)


def tidy(checkpoints: Path) -> None:
    """Complete the removals that an earlier attempt did not finish; rank 0 only."""
    with contextlib.suppress(OSError):  # an unreadable one stays
        for path in checkpoints.glob(".gone-*"):
            sweep(path)
        for path in checkpoints.glob(".step-*"):
            step = step_of(path)
            if step is not None and not damage.of_sizes(checkpoints / f"step-{step}"):
                remove(path)


def prune(checkpoints: Path, keep: int, best: int | None, passed: set[int]) -> None:
    """Of the undamaged checkpoints, keep the newest `keep` and the best; rank 0 only.

    A damaged or unreadable one stays for the user.

    Args:
        passed: steps of newer checkpoints that this training did not use: they stay too, and do
            not count.
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
