"""A step of Slurm that runs parents of ranks: one srun, and the lines that come from it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

# After the loss of a node, Slurm may be unable to create a step of a job, for a moment or until the
# job is requeued (22.05: "Invalid generic resource").
REFUSED = b"srun: error: Unable to create step"
REFUSALS, PAUSE = 2, 1.0  # tries after a refusal, and seconds between them


_SIZE = re.compile(r"--(nodes|ntasks)=\d+")


def on_hosts(srun: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """The srun command for these hosts alone; empty if it is not Slurm's."""
    words = [word for word in srun if not word.startswith("--nodelist=")]
    sized = [f"--{m[1]}={len(hosts)}" if (m := _SIZE.fullmatch(w)) else w for w in words]
    at = next((i for i, word in enumerate(sized) if _SIZE.fullmatch(word)), 0)
    return [*sized[:at], f"--nodelist={','.join(hosts)}", *sized[at:]] if at else []


class ParentStep:
    """A running srun. It is tried again where Slurm cannot create its step.

    Args:
        words: its command.
        quiet: for a node that may not have come back: leave out what srun says of it, and try once.
        tries: steps for this node before.
    """

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], *, quiet: bool, tries: int = 0
    ) -> None:
        self.tries = tries
        self._words, self._environ, self._quiet = list(words), dict(environ), quiet
        self._began, self._ended = time.monotonic(), 0.0
        self._refusals, self._refused = REFUSALS if quiet else 0, False
        self._data = b""
        self.closed = False  # no more lines come
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        try:
            self._process = self._start()
        except BaseException:
            os.close(self._out)
            os.close(self._in)
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        self._refused = False
        return subprocess.Popen(
            self._words, env=self._environ, stdin=subprocess.DEVNULL,
            stdout=self._in, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs, or is tried again."""
        code = self._process.poll()
        if code is None:
            return None
        if not self._ended:
            self._ended = time.monotonic()
            self._read()
        if self._refused and self._refusals < REFUSALS and code > 0:
            if time.monotonic() < self._ended + PAUSE:
                return None
            with contextlib.suppress(OSError):
                self._refusals, self._ended = self._refusals + 1, 0.0
                self._process = self._start()
                return None
        self._close()
        return code

    def _close(self) -> None:
        """No more lines come than those that are there."""
        if self._in >= 0:
            os.close(self._in)
            self._in = -1

    @property
    def age(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._began

    def fileno(self) -> int:
        """The descriptor of its lines, for selectors."""
        return self._out

    def lines(self) -> list[bytes]:
        """The lines that have come, without their ends."""
        over = self._read()
        *lines, self._data = self._data.split(b"\n")
        if over and not self.closed:
            self.closed = True
            os.close(self._out)
            lines += [self._data] if self._data else []
        return [line for line in lines if not (self._quiet and line.startswith(b"srun: "))]

    def _read(self) -> bool:
        """Take in what has come; whether no more comes."""
        while not self.closed:
            try:
                data = os.read(self._out, 1 << 16)
            except BlockingIOError:
                return False
            self._refused |= b"\n" + REFUSED in b"\n" + self._data.rpartition(b"\n")[2] + data
            self._data += data
            if not data:
                return True
        return True

    def kill(self) -> None:
        """End it at once; on living nodes its tasks are gone within a second or two."""
        self._refusals = REFUSALS
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._close()
