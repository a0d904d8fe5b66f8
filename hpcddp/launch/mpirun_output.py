"""Labels the lines of ranks that mpirun starts, as srun does.

    mpirun --tag-output ... | python -P -m hpcddp.launch.mpirun_output RANKS

mpirun writes what it reads from the ranks, piece by piece, with a tag such as `[1,0]<stdout>:`
before each piece and each line. A piece may end within a line, and then another rank's tag
follows in that line. Here the pieces of each rank become lines again.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from hpcddp.attempt.joblog import labelled
from hpcddp.preempt import ignore_stop_signals

# Open MPI 4 writes `[1,0]<stdout>:`, later ones `[prterun-HOST-PID@1,0]<stdout>: `.
TAG = re.compile(rb"\[(?:\d+|([^\[\]\s,]+@\d+)),(\d+)\]<std(?:out|err|diag)>:(?(1) )")
SIZE = 1 << 16  # bytes of one read


class Lines:
    """The lines of all ranks, from the pieces of their output.

    Args:
        ranks: their number; it gives the width of the labels.
    """

    def __init__(self, ranks: int) -> None:
        self._width = len(str(ranks - 1))
        self._begun: dict[int, bytes] = {}  # rank -> the beginning of its next line
        self._rest = b""  # of the input, after its last newline

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that this part of mpirun's output completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield self._complete(line)

    def finish(self) -> Iterator[bytes]:
        """The lines that no newline ended."""
        if self._rest:
            yield self._complete(self._rest)
        for rank, text in sorted(self._begun.items()):
            yield labelled(rank, self._width, text)

    def _complete(self, line: bytes) -> bytes:
        """The line of the last rank in it; the pieces of others are the beginnings of theirs."""
        own, *pieces = TAG.split(line)
        if not pieces:
            return own + b"\n"  # mpirun's own words
        ranks, texts = list(map(int, pieces[1::3])), pieces[2::3]
        for rank, text in zip(ranks, texts, strict=True):
            self._begun[rank] = self._begun.get(rank, b"") + text
        return (own + b"\n" if own else b"") + labelled(
            ranks[-1], self._width, self._begun.pop(ranks[-1])
        )


def main(args: list[str]) -> int:
    """Label stdin until its end; a signal that ends the ranks leaves their last lines."""
    ignore_stop_signals()
    lines = Lines(int(args[0]))
    while data := os.read(0, SIZE):
        _write(b"".join(lines.feed(data)))
    _write(b"".join(lines.finish()))
    return 0


def _write(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        pass  # a full disk loses lines, not ranks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
