"""All files and folders below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

Folders = frozenset[tuple[int, int]]  # device and inode


def walk(
    folder: Path, *, hidden: bool = True, prefix: str = "", above: Folders = frozenset()
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Each entry with its name relative to the root, sorted, a folder before its entries.

    Links are followed, cycles are not.

    Args:
        hidden: include names that begin with a dot.
        prefix: put before each name.
        above: the folders that contain this one, to stop at cycles.

    Raises:
        OSError: a folder cannot be read.
    """
    facts = folder.stat()
    if (facts.st_dev, facts.st_ino) in above:
        return
    above |= {(facts.st_dev, facts.st_ino)}
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.name.startswith(".") and not hidden:
            continue
        name = prefix + entry.name
        yield name, entry
        if entry.is_dir():
            yield from walk(Path(entry.path), hidden=hidden, prefix=f"{name}/", above=above)
