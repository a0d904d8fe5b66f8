"""One listing for all ranks and attempts of a run: written once, read by all.

Rank 0 lists the root and links the file into place. The other ranks wait while rank 0 shows
progress; without progress they list the root too. All ranks read the file that came first, so that
objects added meanwhile change nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hpcddp.data import listing as listing_
from hpcddp.data.listing import Listing
from hpcddp.errors import TopologyError
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank

SIGN_SECONDS = 0.5  # between two signs of progress
SILENT_SECONDS = 60.0  # without progress, after which another rank lists too
LOOK_SECONDS = 0.1
# Folders whose path differs between nodes and between attempts of a job.
NODE_FOLDERS = ("HPCDDP_STAGE", "SLURM_TMPDIR", "TMPDIR", "SCRATCH")


def listing_of(root: str, look: Callable[[], Listing]) -> Listing:
    """The run's listing of a root; outside a run the result of ``look``.

    Raises:
        UserError, StoreUnreachable: as ``look``.
    """
    run = run_of_here()
    if run is None:
        return look()
    path = run.listing(name_of(everywhere(root, os.environ)))
    with contextlib.suppress(FileNotFoundError):
        return listing_.read(path)
    if rank_of_here().world_rank == 0 or not _awaited(path):
        with _signs(path):
            listing_.write(path, look())
    return listing_.read(path)


def run_of_here() -> RunDir | None:
    """The run of this process; None outside a run."""
    folder = os.environ.get("HPCDDP_RUN_DIR")
    run = RunDir(folder) if folder else None
    return run if run and run.job.exists() else None


def rank_of_here() -> Rank:
    """This process's rank; rank 0 of 1 where the environment is incomplete."""
    try:
        return Rank.from_env(os.environ)
    except TopologyError:
        return Rank(0, 1, 0, 1, 0)


def everywhere(root: str, environ: Mapping[str, str]) -> str:
    """Name a root by a string that is the same on all nodes and in all attempts."""
    for name in NODE_FOLDERS:
        folder = environ.get(name, "").rstrip("/")
        if folder and root.startswith(f"{folder}/"):
            return f"${name}{root[len(folder) :]}"
    return root


def name_of(root: str) -> str:
    """The file name for a root: its last characters, to be readable, and a hash of it."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", root)[-40:].strip("-").lower() or "root"
    return f"{slug}-{hashlib.sha256(root.encode('utf-8', 'surrogateescape')).hexdigest()[:10]}"


def _sign(path: Path) -> Path:
    return path.with_name(f".{path.name}.progress")


def _awaited(path: Path) -> bool:
    """Wait for rank 0's file, and return whether it exists.

    Progress means that the progress file has changed. The clocks of two nodes are never compared.
    """
    last, since = None, time.monotonic()
    while not path.exists():
        with contextlib.suppress(OSError):
            if (sign := _sign(path).read_text()) != last:
                last, since = sign, time.monotonic()
        if time.monotonic() - since >= SILENT_SECONDS:  # this process may have been paused
            return path.exists()
        time.sleep(LOOK_SECONDS)
    return True


@contextlib.contextmanager
def _signs(path: Path) -> Iterator[None]:
    """Update the progress file while this process lists."""
    path.parent.mkdir(exist_ok=True)
    done = threading.Event()

    def show() -> None:
        begun = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                _sign(path).write_text(f"{os.getpid()} {time.monotonic() - begun:.1f}\n")
            if done.wait(SIGN_SECONDS):
                return

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            _sign(path).unlink()
