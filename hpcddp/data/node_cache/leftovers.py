"""Staged data of ended runs on a node is removed at their end, or when another run stages."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from hpcddp.attempt import ledger
from hpcddp.attempt.decision import RETURNS
from hpcddp.attempt.fence import remove, sweep
from hpcddp.data.node_cache import claims
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir, read_json

OLD = 86400.0  # seconds after which a folder without its run is removed
LONG = 7 * OLD  # the same, where its owner may be a process of another PID namespace


def leave(folder: Path) -> None:
    """Remove the data that an ended run has staged on this node."""
    with contextlib.suppress(OSError):
        remove(folder)
        if not any(path.is_dir() for path in folder.parent.iterdir()):  # the last virtual node
            remove(folder.parent)


def clear(base: Path, own: Path) -> None:
    """Remove the staged data of ended runs on this node."""
    for folder in base.iterdir():
        with contextlib.suppress(OSError, HpcddpError):
            if folder.name.startswith(".gone-"):
                sweep(folder)
            elif folder != own and _over(folder):
                remove(folder)


def _over(folder: Path) -> bool:
    """Whether a folder is no longer needed, because its run will not continue by itself.

    A run that is missing here may exist on another node or in a container. Then its copying process
    must have ended too.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        run = RunDir((folder / "run").read_text())
        run.job.stat()
        last = ledger.last(run)
        return last is not None and not last.live and last.action not in RETURNS
    owners = list(folder.glob("*/.owner"))
    newest = max(path.stat().st_mtime for path in (folder, *owners))
    return time.time() - newest > OLD and not any(map(_works, owners))


def _works(owner: Path) -> bool:
    return claims.lives(str((read_json(owner) or {}).get("who")), owner, LONG)
