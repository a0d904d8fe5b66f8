"""A folder of runs on a small file system of its own, and what can become of that for a while."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SIZE = "48m"


@contextlib.contextmanager
def small(folder: Path) -> Iterator[Path]:
    """A folder on a file system of its own."""
    folder.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder)
    try:
        yield folder
    finally:
        _umount(folder)


def full(run: Path) -> None:
    """Nothing more fits."""
    with (run.parent / "filler").open("wb") as f, contextlib.suppress(OSError):
        while True:
            os.write(f.fileno(), bytes(1 << 16))
    with (run.parent / "filler").open("ab") as f, contextlib.suppress(OSError):
        while True:
            os.write(f.fileno(), bytes(512))


def read_only(run: Path) -> None:
    """Nothing can be written."""
    with tempfile.TemporaryDirectory() as place:  # a mount with an open file is not made so
        _mount("--bind", run, place)
        _mount("--make-private", place)  # else the last one would be mounted here too
        _mount("-o", "remount,ro,bind", place)
        _mount("--bind", place, run)
        _umount(place)


def away(run: Path) -> None:
    """Nothing is there."""
    _mount("-t", "tmpfs", "tmpfs", run)


def well(run: Path) -> None:
    """As before."""
    (run.parent / "filler").unlink(missing_ok=True)
    while f" {run} " in Path("/proc/mounts").read_text():
        _umount(run)


TROUBLES = {"full": full, "read-only": read_only, "away": away}


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def _umount(folder: str | Path) -> None:
    subprocess.run(["umount", "--lazy", folder], check=True)
