"""The log of an attempt, on a disk that does not answer."""

import os
import subprocess
import sys
from pathlib import Path

WRITE = """
import os, pathlib, sys, time
from hpcddp.attempt.link.log_writer import LogWriter
asked = os.dup(2)  # the writer replaces 1 and 2
log = LogWriter()
for name in sys.argv[1:]:
    log.open(pathlib.Path(name))
    log.write(name.encode())
os.write(asked, b"asked\\n")
while not log.idle:
    time.sleep(0.01)
"""


def test_lines_come_in_their_order_and_nobody_waits_for_them(tmp_path: Path) -> None:
    """A pipe that nobody reads stands for the disk."""
    first, slow, last = (tmp_path / name for name in ("first", "slow", "last"))
    first.touch()
    last.touch()
    os.mkfifo(slow)
    names = [str(path) for path in (first, slow, last)]
    with subprocess.Popen([sys.executable, "-c", WRITE, *names], stderr=subprocess.PIPE) as writer:
        assert writer.stderr and writer.stderr.readline() == b"asked\n"
        assert writer.poll() is None and last.read_bytes() == b""
        assert slow.read_bytes() == names[1].encode()
        assert writer.wait(30) == 0
    assert (first.read_text(), last.read_text()) == (names[0], names[2])
