"""The user's disk quotas, which statvfs(2) does not tell: from `quota` and `lfs quota`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpcddp.doctor.check_finding import WARNING, CheckFinding
from hpcddp.sizes import counted, size

TIMEOUT = 10.0  # seconds; a file server may be away
NEAR = 0.95  # of a quota
KB = 1024  # both programs count so
# An amount: quota(1) marks one over its limit, lfs-quota(1) one that it could not read whole.
AMOUNT = re.compile(r"\[?(\d+)\]?\*?")


class Quota(NamedTuple):
    """A quota; the limits are 0 for none.

    Args:
        place: the file system.
        used: in bytes, as is its limit.
    """

    place: str
    used: int
    limit: int
    files: int
    most_files: int

    def __str__(self) -> str:
        parts = [f"{size(self.used)} of {size(self.limit)}"] if self.limit else []
        parts += [f"{self.files} of {self.most_files} files"] if self.most_files else []
        return f"{' and '.join(parts)} on {self.place}"


def read(folder: Path) -> list[Quota]:
    """The quotas that are known here.

    Args:
        folder: on a file system of Lustre, whose quotas only its own program tells.
    """
    commands = (["quota", "-w"], ["lfs", "quota", "-u", str(os.getuid()), str(folder)])
    return [row for command in commands for row in parse(_said(command))]


def _said(command: list[str]) -> str:
    program = shutil.which(command[0])
    if program:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # Both exit with an error if a quota is exceeded, or a file system has none.
            return subprocess.run(
                [program, *command[1:]], capture_output=True, text=True, errors="replace",
                stdin=subprocess.DEVNULL, timeout=TIMEOUT, check=False,
                env={**os.environ, "LC_ALL": "C"},
            ).stdout  # fmt: skip
    return ""


def parse(text: str) -> Iterator[Quota]:
    """The quotas in a table: used, soft and hard limit, of blocks and of files. A long name stands
    in a line of its own."""
    name = ""
    for line in text.splitlines():
        words = line.split()
        amounts = [int(match[1]) for word in words if (match := AMOUNT.fullmatch(word))]
        if len(amounts) == 6:
            place = name if AMOUNT.fullmatch(words[0]) else words[0]
            used, soft, hard, files, soft_files, hard_files = amounts
            row = Quota(place, used * KB, _least(soft, hard) * KB, files,
                        _least(soft_files, hard_files))  # fmt: skip
            if row.limit or row.most_files:
                yield row
        name = words[0] if len(words) == 1 else ""


def _least(soft: int, hard: int) -> int:
    """The limit that is met first; 0 for none."""
    return min(soft or hard, hard or soft)


def findings(rows: list[Quota]) -> Iterator[CheckFinding]:
    """Quotas that are nearly used up."""
    hint = "remove files, or use another folder: a full quota ends jobs"
    for row in rows:
        if row.limit and row.used > NEAR * row.limit:
            what = f"{size(row.used)} of a quota of {size(row.limit)} are used on {row.place}"
            yield CheckFinding(WARNING, "here", what, hint)
        if row.most_files and row.files > NEAR * row.most_files:
            most = counted(row.most_files, "file")
            what = f"{row.files} of a quota of {most} are used on {row.place}"
            yield CheckFinding(WARNING, "here", what, hint)
