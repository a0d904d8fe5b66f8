"""The fence: older attempts can publish no more, however long their processes live.

It removes folders in which they may still write.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from hpcddp.rundir import RunDir, token

SWEEPS = 5  # tries at a folder in which an older life still writes


def fence(run: RunDir, attempt: int) -> None:
    """Take away what older attempts write in: none of them can publish or send any more.

    An older life may still run. It publishes by renaming out of its folder, and it never makes
    that folder anew: once the folder is gone, its writes and its rename find no such path. The
    rename takes the name at once, however long the removal takes.
    """
    saving = list(run.checkpoints.glob(".saving-*"))
    attempts = run.all_attempts()
    newer = {folder.number for folder in attempts if folder.number > attempt}
    for path in saving:
        number = path.name.removeprefix(".saving-")
        if number == str(attempt) or (number.isdecimal() and int(number) in newer):
            continue
        with contextlib.suppress(OSError):  # another one was first
            remove(path)
    for older in attempts:
        if older.number < attempt:
            with contextlib.suppress(OSError):
                remove(older.sending)


def remove(folder: Path) -> None:
    """Remove a folder, which has no name of its own from the first instant on.

    A process may write in it still; what is left then goes with the next `sweep`.

    Raises:
        OSError: it is not there, or cannot be renamed.
    """
    gone = folder.with_name(f".gone-{token(4)}")
    folder.rename(gone)
    sweep(gone)


def sweep(gone: Path) -> None:
    """Remove a folder that may still grow, as far as it can be removed."""
    for _ in range(SWEEPS):
        shutil.rmtree(gone, ignore_errors=True)
        if not gone.exists():
            return
