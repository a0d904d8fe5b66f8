"""Wheels and sdists of this checkout, built from a copy of it."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from sites import CHECKOUT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def tracked() -> list[str]:
    """The files of the repository, new ones too; an empty list where this is none."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0")[:-1]
    return [name for name in names if (CHECKOUT / name).is_file()]


def copied(target: Path) -> Path:
    """A copy of the repository's files."""
    for name in tracked():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, target / name)
    return target


def built(kind: str, source: Path, target: Path) -> Path:
    """The "wheel" or "sdist" of a folder, as pip has it built."""
    target.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), target], cwd=source, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (made,) = target.iterdir()
    return made


def unpacked(sdist: Path, target: Path) -> Path:
    """The folder in an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (folder,) = target.iterdir()
    return folder


def contents(wheel: Path) -> dict[str, bytes]:
    """Name -> bytes of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
