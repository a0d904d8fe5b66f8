"""An image for containers: Debian with its Python 3.11, and torch, and without hpcddp."""

import fcntl
import os
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import slurm_releases
from pythons import needed

SUITE = "bookworm"  # whose Python is of the version of the tests'
PACKAGES = "lib/python3.11/dist-packages"
MARK = "complete"


def folder() -> Path:
    """Where it lies: beside the releases of Slurm, unless TEST_IMAGE says so."""
    given = os.environ.get("TEST_IMAGE")
    return Path(given) if given else slurm_releases.root() / "image"


def ready() -> bool:
    """Whether it is there."""
    return (folder() / MARK).exists()


def made() -> Path:
    """The image's folder; the first time it is made, which takes a minute."""
    if ready():
        return folder()
    slurm_releases.root().mkdir(parents=True, exist_ok=True)
    with slurm_releases.locked("image.lock", fcntl.LOCK_EX):
        if not ready():  # no other process was first
            _make(folder())
    return folder()


def _make(image: Path) -> None:
    slurm_releases.clear(image)
    words = ["debootstrap", "--variant=minbase", "--include=python3", SUITE, str(image)]
    try:
        subprocess.run([*words, *slurm_releases.mirror()], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise slurm_releases.ReleaseError(f"no image for containers: {error}") from error
    _copy_torch(image / "usr/local" / PACKAGES)
    (image / MARK).touch()


def _copy_torch(target: Path) -> None:
    """Copy torch and what it needs from this environment."""
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(needed("torch") | {"numpy"}):
        for file in distribution(name).files or []:
            top = file.parts[0]
            source = Path(str(distribution(name).locate_file(top)))
            if top in ("..", "__pycache__") or (target / top).exists():
                continue
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, target / top)
