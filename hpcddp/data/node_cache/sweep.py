"""The files in a cache's folder, and the order in which they go. A look at a million files takes
seconds and little memory: their names are not kept, and are read again where some must go."""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from hpcddp.data.node_cache import claims

FOLDERS = 256
UNUSED = 14 * 86400.0  # seconds after which an unused file goes


class Files:
    """A look at all files. Those of killed processes, and long unused ones, go at once.

    ``held`` are the bytes of whole files, ``claimed`` those on their way.
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
        """Remove the least recently used, so many bytes of them at least; how many it were."""
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
        """The last use of the newest file that goes, and the bytes that must go of that time."""
        last, rest = -1.0, 0
        for number in sorted(range(len(self._times)), key=self._times.__getitem__):
            if least <= 0:
                break
            if self._times[number] != last:
                last, rest = self._times[number], least
            least -= self._sizes[number]
        return last, rest

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """All files, in no order."""
        for number in range(FOLDERS):
            folder = self._folder / f"{number:02x}"
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                yield from entries


def _claimed(claim: Path) -> int:
    """Bytes that are on their way; the claim of a killed process goes."""
    who, size = claims.holder(claim)
    if not who and not claim.exists():  # given back: its file may have come after the look
        with contextlib.suppress(OSError):
            return claim.with_suffix("").stat().st_size
        return 0
    if claims.lives(who, claim):
        return size
    with contextlib.suppress(OSError):
        claim.unlink()
    return 0


def clear(part: Path) -> None:
    """Remove the part of a file, if its process is gone. Its name ends with WHO.TOKEN.part."""
    if not claims.lives(part.name.split(".")[-3], part):
        with contextlib.suppress(OSError):
            part.unlink()
