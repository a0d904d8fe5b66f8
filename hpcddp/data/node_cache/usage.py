"""How many bytes a cache holds, known to all its processes without a look at each file.

A journal beside the files: a header, then 8 bytes for each change, appended in one piece. A process
reads the changes since its last look. Errors that killed processes leave in it go when the journal
is written anew, from a count of the files.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import time
from pathlib import Path
from typing import BinaryIO

from hpcddp.rundir import token

HEADER = struct.Struct("<qq")  # nanoseconds since the epoch, bytes held then
CHANGE = struct.Struct("<q")


class Usage:
    """Plain data, and no open file: it may be forked, pickled, and used by several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (0, 0, 0)  # the journal's time, bytes of it that were read, their sum

    @property
    def known(self) -> bool:
        """Whether there is a journal."""
        return self._path.exists()

    def age(self) -> float:
        """Seconds since it was written anew."""
        return time.time() - self._read()[0] / 1e9

    def total(self) -> int:
        """Bytes held."""
        return self._read()[2]

    def add(self, change: int) -> None:
        """Note a change. A disk that takes half of it leaves no journal."""
        with contextlib.suppress(OSError):
            while not self._append(change) and change > 0:
                pass  # rather noted twice than in a journal that has been replaced

    def _append(self, change: int) -> bool:
        """Whether the journal was still the one that is read, afterwards."""
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(file, CHANGE.pack(change)) < CHANGE.size:
                self._path.unlink()
                return True
            return os.path.samestat(os.fstat(file), self._path.stat())
        finally:
            os.close(file)

    def position(self) -> tuple[int, int]:
        """Where the journal ends now; see `renew`."""
        began, offset, _ = self._read()
        return began, offset

    def renew(self, total: int, since: tuple[int, int]) -> None:
        """Write it anew.

        Args:
            total: bytes that the look counted.
            since: where the journal ended when the look began. Later changes may be in the total
                too: rather too much than too little.
        """
        aside = self._path.with_name(f".{self._path.name}.{token(4)}")
        with contextlib.suppress(OSError), self._open() as old:
            total += max(0, _sum_after(old, *since))
            aside.write_bytes(HEADER.pack(time.time_ns(), total))
            aside.replace(self._path)
            if (late := sum(_changes(old.read()))) > 0:  # its writers may not have seen this
                self.add(late)
            return
        aside.unlink(missing_ok=True)

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            return io.BytesIO()

    def _read(self) -> tuple[int, int, int]:
        """Read on. The state is replaced as a whole: threads that read at once get the same one."""
        try:
            with self._path.open("rb") as file:
                began, total = HEADER.unpack(file.read(HEADER.size))
                seen = self._seen
                if seen[0] != began:
                    seen = (began, HEADER.size, total)
                file.seek(seen[1])
                changes = _changes(file.read())
        except (OSError, struct.error):
            return 0, 0, 0
        self._seen = (began, seen[1] + len(changes) * CHANGE.size, seen[2] + sum(changes))
        return self._seen


def _sum_after(journal: BinaryIO, began: int, offset: int) -> int:
    """The sum of a journal's changes after an offset; 0 if it is another than the one that began
    then. Only changes that come from now on are left to read."""
    head = journal.read(HEADER.size)
    if len(head) < HEADER.size or HEADER.unpack(head)[0] != began:
        journal.read()
        return 0
    journal.seek(offset)
    changes = _changes(journal.read())
    journal.seek(offset + len(changes) * CHANGE.size)
    return sum(changes)


def _changes(data: bytes) -> tuple[int, ...]:
    count = len(data) // CHANGE.size
    return struct.unpack(f"<{count}q", data[: count * CHANGE.size])
