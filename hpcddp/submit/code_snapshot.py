"""Step 4: a copy of a command's code in the run's working folder.

Each content is stored once for all runs, beside them (RUNS/.code) and read-only, and the working
folder links to it. Which files these are is known already: planning/code_files.py finds them.
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
    """Make a run's working folder; each content is stored once for all runs.

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
            f"the code cannot be copied: {error.strerror}", where=where,
            hint="make room or mend its mode; --no-snapshot works in the folder itself",
        ) from None  # fmt: skip


def _place(source: Path, store: Path, path: Path) -> None:
    """Put a file's content under a path, from the store."""
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
