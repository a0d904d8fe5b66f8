"""The terminal during `watch`: changed at the start, and restored at the end.

It is restored after a key, Ctrl-C, TERM, HUP, QUIT or an error, and after Ctrl-Z until the shell
continues the command.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from types import FrameType

# Switch to another screen, hide the cursor, do not wrap lines; and undo all of that.
ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H\x1b[2J"
LEAVE = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def size(default: tuple[int, int] = (80, 24)) -> tuple[int, int]:
    """Columns and lines: those of COLUMNS and LINES, but at most the terminal's.

    Args:
        default: without a terminal.
    """
    asked = shutil.get_terminal_size(default)
    with contextlib.suppress(OSError, ValueError):
        real = os.get_terminal_size(sys.stdout.fileno())
        if real.columns and real.lines:
            return min(asked.columns, real.columns), min(asked.lines, real.lines)
    return asked.columns, asked.lines


class Screen:
    """A terminal that shows one picture after the other, and reads keys."""

    def __init__(self) -> None:
        self._out, self._in = sys.stdout.fileno(), sys.stdin.fileno()
        self._keys = os.isatty(self._in)
        self._shown: list[str] = []
        self._size = (0, 0)

    @contextlib.contextmanager
    def taken(self) -> Iterator[Screen]:
        """Use the terminal for a block.

        Raises:
            SystemExit: TERM, HUP or QUIT arrived; the code is 128 plus its number, as in a shell.
        """
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, _leave) for number in ENDS}
        handlers[signal.SIGINT] = signal.getsignal(signal.SIGINT)
        handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, frame: None)
        handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        self._mode = termios.tcgetattr(self._in) if self._keys else None
        try:
            self._enter()
            yield self
        finally:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)  # no signal interrupts the clean-up
            self._give_back()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            os.close(wake)
            os.close(self._wake)

    def _enter(self) -> None:
        self._shown = []
        if self._keys:
            tty.setcbreak(self._in, termios.TCSANOW)
        self._write(ENTER)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._write(LEAVE)
        if self._mode is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSANOW, self._mode)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: give the terminal to the shell until it continues this command."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self._enter()

    def show(self, lines: Sequence[str]) -> None:
        """Show a picture: write only the changed lines."""
        if size() != self._size:
            self._size, self._shown = size(), []
        lines = lines[: self._size[1]]
        old, self._shown = self._shown, list(lines)
        changes = [] if old else ["\x1b[2J"]
        for i in range(max(len(lines), len(old))):
            line = lines[i] if i < len(lines) else ""
            if i >= len(old) or old[i] != line:
                changes.append(f"\x1b[{i + 1};1H\x1b[0m\x1b[K{line}\x1b[0m")
        self._write("".join(changes).encode("utf-8", "replace"))

    def key(self, seconds: float) -> bytes:
        """The keys pressed within this time; nothing if there are none, or the size changes."""
        ready, _, _ = select.select([self._in] * self._keys + [self._wake], [], [], seconds)
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._in not in ready:
            return b""
        pressed = os.read(self._in, 4096)
        if not pressed:
            raise SystemExit(128 + signal.SIGHUP)
        return pressed

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._out, data) :]


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
