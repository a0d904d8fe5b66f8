"""The progress of a node's ranks, in memory that they share with their parent (memfd_create(2))."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

NAME = "HPCDDP_PROGRESS"  # the variable with the descriptor
SIZE = 8  # bytes of a count


class Progress:
    """The counts of the ranks of a node.

    Args:
        ranks: their number.
    """

    def __init__(self, ranks: int) -> None:
        self.descriptor = os.memfd_create("hpcddp-progress", 0)  # a rank may replace itself
        os.ftruncate(self.descriptor, SIZE * ranks)
        self._counts = memoryview(mmap.mmap(self.descriptor, SIZE * ranks)).cast("Q")

    @property
    def total(self) -> int:
        """The sum of all counts; it changes with each step of a rank."""
        return sum(self._counts)


def own_count(environ: Mapping[str, str]) -> memoryview:
    """The count of a rank, as a view of one number; of its own memory if it has no parent."""
    try:
        memory = mmap.mmap(int(environ[NAME]), 0)
        return memoryview(memory).cast("Q")[int(environ["LOCAL_RANK"]) :][:1]
    except (KeyError, ValueError, OSError):
        return memoryview(bytearray(SIZE)).cast("Q")
