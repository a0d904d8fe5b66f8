"""The progress of a node's ranks, in memory that they share with their parent (memfd_create(2))."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

NAME = "HPCDDP_PROGRESS"  # the variable with the descriptor
FILE = "hpcddp-progress"
SIZE = 8  # bytes of a count


class Progress:
    """The counts of the ranks of a node.

    Args:
        ranks: their number.
    """

    def __init__(self, ranks: int) -> None:
        self.descriptor = os.memfd_create(FILE, 0)  # a rank may replace itself
        os.ftruncate(self.descriptor, SIZE * ranks)
        self._counts = memoryview(mmap.mmap(self.descriptor, SIZE * ranks)).cast("Q")

    @property
    def total(self) -> int:
        """The sum of all counts; it changes with each step of a rank."""
        return sum(self._counts)


def own_count(environ: Mapping[str, str]) -> memoryview:
    """The count of a rank, as a view of one number; of its own memory if it has no parent."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor, rank = int(environ[NAME]), int(environ["LOCAL_RANK"])
        # The variable may have come to a process without its descriptor.
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        if str(file).startswith(f"/memfd:{FILE} "):
            counts = memoryview(mmap.mmap(descriptor, 0)).cast("Q")
            if rank < len(counts):
                return counts[rank : rank + 1]
    return memoryview(bytearray(SIZE)).cast("Q")
