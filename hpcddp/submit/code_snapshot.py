"""Step 4: the code snapshot, a copy of a command's code in the run's working folder.

Each distinct file content is stored once for all runs, read-only in RUNS/.code, and the working
folder links to it. planning/code_files.py has found the files before.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.planning.code_files import CodeFiles
from hpcddp.rundir import write_bytes

STORE = ".code"
EXECUTABLE = 0o111


def copy(code: CodeFiles, runs: Path, folder: Path) -> None:
    """Create a run's working folder.

    Raises:
        UserError: it cannot be written.
    """
    try:
        (runs / STORE).mkdir(exist_ok=True, mode=0o700)
        for path in code.files:
            _place(code.root / path, runs / STORE, folder / path)
        for path in code.folders:
            (folder / path).mkdir(parents=True, exist_ok=True)
        for path, target in code.links.items():
            link = folder / path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        (folder / code.below).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = str(error.filename or folder)
        raise UserError(
            f"cannot copy the code: {error.strerror}", where=where,
            hint="free space or fix its permissions; --no-snapshot runs the code without a copy",
        ) from None  # fmt: skip


def _place(source: Path, store: Path, path: Path) -> None:
    """Store a file's content, and link a path to it."""
    data = source.read_bytes()
    kept = source.stat().st_mode & EXECUTABLE
    name = hashlib.sha256(data).hexdigest() + ("x" if kept else "")
    stored = store / name[:2] / name
    if not stored.exists() or stored.read_bytes() != data:  # root may have written it
        stored.parent.mkdir(exist_ok=True)
        write_bytes(stored, data, 0o444 | (kept and EXECUTABLE))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.hardlink_to(stored)
    except OSError:  # a file system without hard links, or too many of them
        shutil.copy(stored, path)
