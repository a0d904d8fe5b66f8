"""The fence: a superseded attempt can publish nothing, even if its processes still run.

It removes the folders in which older attempts write.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from hpcddp.rundir import RunDir, token

SWEEPS = 5  # tries at a folder in which an older attempt still writes


def fence(run: RunDir, attempt: int) -> None:
    """Remove the folders in which older attempts write: they can publish and send nothing more.

    An older attempt may still run. It publishes by renaming out of its folder, which it never
    creates again: without the folder, its writes and its rename fail. Here the folder is renamed
    first, however long its removal takes.
    """
    saving = list(run.checkpoints.glob(".saving-*"))
    attempts = run.all_attempts()
    newer = {folder.number for folder in attempts if folder.number > attempt}
    for path in saving:
        number = path.name.removeprefix(".saving-")
        if number == str(attempt) or (number.isdecimal() and int(number) in newer):
            continue
        with contextlib.suppress(OSError):  # already gone
            remove(path)
    for older in attempts:
        if older.number < attempt:
            with contextlib.suppress(OSError):
                remove(older.sending)


def remove(folder: Path) -> None:
    """Rename a folder, then remove it.

    A process may still write in it; the next `sweep` removes the rest.

    Raises:
        OSError: it does not exist, or cannot be renamed.
    """
    gone = folder.with_name(f".gone-{token(4)}")
    folder.rename(gone)
    sweep(gone)


def sweep(gone: Path) -> None:
    """Remove a folder that may still grow, as far as possible."""
    for _ in range(SWEEPS):
        shutil.rmtree(gone, ignore_errors=True)
        if not gone.exists():
            return
