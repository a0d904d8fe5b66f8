"""A real terminal for the tests: a pty with a program on it, and the screen that a person sees."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyte
from pyte import modes
from sites import COMMAND

SECONDS = 60.0  # until a test gives up


class Terminal:
    """A terminal of a size, with hpcddp on it; a context manager that ends what still runs.

    Args:
        shell: what bash, with job control, does with the command that are its arguments.
        environ: changes; None takes a variable away.
    """

    def __init__(
        self,
        *arguments: str | Path,
        columns: int = 80,
        lines: int = 24,
        shell: str = "",
        **environ: str | None,
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._ours, theirs = pty.openpty()
        self._size(columns, lines)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        bash = ["/bin/bash", "-mc", shell, "bash"] if shell else []
        usual = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "NO_COLOR": None}
        wanted = os.environ | usual | environ
        self.process = subprocess.Popen(
            [*bash, COMMAND, *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={name: value for name, value in wanted.items() if value is not None},
        )  # fmt: skip

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def _size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        """What a window manager does; the kernel tells the program."""
        self.screen.resize(lines, columns)
        self._size(columns, lines)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, *told: str, holds: Callable[[str], Any] = bool) -> str:
        """The screen, as soon as it has all of these words, and something holds of it."""
        deadline = time.monotonic() + SECONDS
        while missing := [word for word in told if word not in self.text] or not holds(self.text):
            assert time.monotonic() < deadline, f"{missing}\n{self.text}"
            ended = self.process.poll() is not None
            assert self._read(0.2) or not ended, f"{missing}\n{self.text}"
        return self.text

    def left(self) -> int:
        """The exit code, once all that was written is on the screen."""
        deadline = time.monotonic() + SECONDS
        ended = read = False
        while not ended or read:
            assert time.monotonic() < deadline, self.text
            ended = self.process.poll() is not None
            read = self._read(0.05)
        return self.process.wait()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        data = os.read(self._ours, 1 << 16)
        self.raw += data
        self._stream.feed(data)
        return True

    def check_clean(self) -> None:
        """It is as it was before: input modes, cursor, line wrap, and the usual screen."""
        assert termios.tcgetattr(self._theirs) == self.before
        assert not self.screen.cursor.hidden
        assert modes.DECAWM in self.screen.mode
        assert self.raw.count(b"\x1b[?1049h") == self.raw.count(b"\x1b[?1049l")
        assert self.raw.rfind(b"\x1b[?1049l") >= self.raw.rfind(b"\x1b[?1049h")
