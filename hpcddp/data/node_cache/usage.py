"""The number of bytes in a cache, which all its processes share without a scan of the files.

It is a journal beside the files: a header, then 8 bytes for each change, appended in one write. A
process reads the changes since its last read. A killed process may leave errors in the journal,
which a later rewrite from a count of the files corrects.
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

HEADER = struct.Struct("<qq")  # time in nanoseconds since the epoch, bytes at that time
CHANGE = struct.Struct("<q")


class Usage:
    """Plain data without an open file: it may be forked, pickled, and used by several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (0, 0, 0)  # the journal's time, its bytes read so far, their sum

    @property
    def known(self) -> bool:
        """Whether the journal exists."""
        return self._path.exists()

    def age(self) -> float:
        """Seconds since the journal was rewritten."""
        return time.time() - self._read()[0] / 1e9

    def total(self) -> int:
        """Bytes in the cache."""
        return self._read()[2]

    def add(self, change: int) -> None:
        """Append a change. If the disk writes only a part of it, the journal is removed."""
        with contextlib.suppress(OSError):
            while not self._append(change) and change > 0:
                pass  # better appended twice than to a replaced journal

    def _append(self, change: int) -> bool:
        """Append; return whether the journal was not replaced meanwhile."""
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(file, CHANGE.pack(change)) < CHANGE.size:
                self._path.unlink()
                return True
            return os.path.samestat(os.fstat(file), self._path.stat())
        finally:
            os.close(file)

    def position(self) -> tuple[int, int]:
        """The present end of the journal, for `renew`."""
        began, offset, _ = self._read()
        return began, offset

    def renew(self, total: int, since: tuple[int, int]) -> None:
        """Rewrite the journal.

        Args:
            total: bytes that the scan counted.
            since: the end of the journal when the scan began. Later changes may be in the total
                too: too large a number is safer than too small.
        """
        aside = self._path.with_name(f".{self._path.name}.{token(4)}")
        with contextlib.suppress(OSError), self._open() as old:
            total += max(0, _sum_after(old, *since))
            aside.write_bytes(HEADER.pack(time.time_ns(), total))
            aside.replace(self._path)
            if (
                late := sum(_changes(old.read()))
            ) > 0:  # their writers may not have noticed the replacement
                self.add(late)
            return
        aside.unlink(missing_ok=True)

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            return io.BytesIO()

    def _read(self) -> tuple[int, int, int]:
        """Read the new changes. The state is replaced as a whole, which is safe for threads."""
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
    """The sum of a journal's changes after an offset; 0 if the journal was replaced.

    Afterwards only later changes are left to read.
    """
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
