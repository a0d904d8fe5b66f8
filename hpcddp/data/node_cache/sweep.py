"""The files in a cache's folder, and the order of their eviction.

A scan of a million files takes seconds and little memory: names are not stored, and are read again
for an eviction.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from hpcddp.data.node_cache import claims

FOLDERS = 256
UNUSED = 14 * 86400.0  # seconds after which an unused file is removed


class Files:
    """A scan of all files. It removes parts of killed processes and files unused for long.

    ``held`` are the bytes of complete files, ``claimed`` those of files being fetched.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times, self._sizes = array("d"), array("q")
        self.claimed = 0
        for entry in self._entries():
            if entry.name.endswith(".claim"):
                self.claimed += _claimed(Path(entry.path))
            elif entry.name.endswith(".part"):
                clear(Path(entry.path))
            else:
                with contextlib.suppress(OSError):
                    facts = entry.stat()
                    if time.time() - facts.st_mtime > UNUSED:
                        Path(entry.path).unlink()
                        continue
                    self._times.append(facts.st_mtime)
                    self._sizes.append(facts.st_size)
        self.held = sum(self._sizes)

    def evict(self, least: int) -> int:
        """Remove the least recently used files, at least ``least`` bytes; return their bytes."""
        last, rest = self._until(least)
        gone = 0
        for entry in self._entries() if least > 0 else ():
            if entry.name.endswith((".claim", ".part")):
                continue
            with contextlib.suppress(OSError):
                facts = entry.stat()
                newest = facts.st_mtime == last
                if facts.st_mtime > last or (newest and rest <= 0):
                    continue
                Path(entry.path).unlink()
                gone += facts.st_size
                rest -= facts.st_size if newest else 0
        return gone

    def _until(self, least: int) -> tuple[float, int]:
        """The last use of the newest file to remove, and the bytes to remove of that time."""
        last, rest = -1.0, 0
        for number in sorted(range(len(self._times)), key=self._times.__getitem__):
            if least <= 0:
                break
            if self._times[number] != last:
                last, rest = self._times[number], least
            least -= self._sizes[number]
        return last, rest

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """All files, in any order."""
        for number in range(FOLDERS):
            folder = self._folder / f"{number:02x}"
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                yield from entries


def _claimed(claim: Path) -> int:
    """Bytes of a file being fetched; the claim of a killed process is removed."""
    who, size = claims.holder(claim)
    if not who and not claim.exists():  # dropped: its file may have appeared after the scan
        with contextlib.suppress(OSError):
            return claim.with_suffix("").stat().st_size
        return 0
    if claims.lives(who, claim):
        return size
    with contextlib.suppress(OSError):
        claim.unlink()
    return 0


def clear(part: Path) -> None:
    """Remove a part file if its process has ended. Its name ends with WHO.TOKEN.part."""
    if not claims.lives(part.name.split(".")[-3], part):
        with contextlib.suppress(OSError):
            part.unlink()
