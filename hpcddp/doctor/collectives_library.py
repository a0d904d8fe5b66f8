"""NCCL or RCCL beside a torch that is not imported, and its network plugin: from files alone."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NAMES = {"cuda": "NCCL", "hip": "RCCL"}  # by what torch was built for
PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
LIBRARY = "librccl.so*"  # a wheel for ROCm brings it in torch/lib; no package tells its version
TEXT = re.compile(rb"RCCL version (?:: )?(\d+\.\d+\.\d+)")
# The libraries that NCCL loads for a network of its own, such as libnccl-net-ofi.so.
PLUGINS = {"cuda": ("libnccl-net*.so*",), "hip": ("librccl-net*.so*", "libnccl-net*.so*")}
FOLDERS = ("*/lib", "nvidia/*/lib", "*.libs")  # of site-packages


def text(kind: str, torch: Path) -> str:
    """Name and version; the version is missing if it is unknown.

    Args:
        kind: cuda or hip.
        torch: the folder of the package.
    """
    number = _nccl() if kind == "cuda" else _rccl(torch)
    return f"{NAMES[kind]} {number}".rstrip()


def _nccl() -> str:
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""


def _rccl(torch: Path) -> str:
    for path in sorted((torch / "lib").glob(LIBRARY)):
        with (
            contextlib.suppress(OSError, ValueError),  # an empty file
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if match := TEXT.search(content):
                return match[1].decode()
    return ""


def plugins(kind: str, torch: Path, environ: Mapping[str, str]) -> list[str]:
    """The network plugins on the way of the dynamic linker and in site-packages."""
    folders = [*map(Path, filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))]
    folders += [folder for name in FOLDERS for folder in sorted(torch.parent.glob(name))]
    return list(dict.fromkeys(_in(folders, PLUGINS[kind])))


def _in(folders: list[Path], patterns: tuple[str, ...]) -> Iterator[str]:
    for folder in folders:
        for pattern in patterns:
            yield from map(str, sorted(folder.glob(pattern)))
