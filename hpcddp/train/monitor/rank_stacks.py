"""A rank's state in a hang: from its file in attempts/N/stacks, or from /proc if it wrote none."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

STATES = {"T": "stopped", "t": "stopped", "D": "disk", "Z": "gone", "X": "gone", "x": "gone"}
# States of a rank that does not run; a rank in the first of them is the suspect.
AWAY = {
    "stopped": "is stopped (SIGSTOP)",
    "gone": "has ended",
    "disk": "waits for its disk",
    "silent": "does not respond",
}
# A rank with its innermost frame here waits for other ranks, or for its GPU, which waits for them.
_TORCH = Path(torch.__file__).parent
WAITS = tuple(
    str(path) + os.sep
    for path in (
        Path(__file__).parents[1],
        *(_TORCH / name for name in ("distributed", "autograd", "nn/parallel", "cuda")),
    )
)
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES = re.compile(r"/(site|dist)-packages/")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SPOKEN_FOR = re.compile(r"rank \d+ on \S+, process \d+: (\w+)")


class Sign(NamedTuple):
    """A rank in a hang: its state, its main thread's innermost frame, and that thread's stack."""

    state: str  # running, stopped, disk, gone, or silent: unknown
    where: str = ""
    waits: bool = False  # for other ranks
    stack: str = ""


def state_of(report: Mapping[str, Any]) -> str:
    """The state of a process on this node, by its pid and start (proc(5), stat)."""
    try:
        text = Path(f"/proc/{report['pid']}/stat").read_text()
    except OSError:
        return "gone"
    letter, *rest = text.rpartition(")")[2].split()
    state = STATES.get(letter, "running")
    return "gone" if rest[18] != report["start"] else state


def speak_for(report: Mapping[str, Any], by: int) -> str:
    """The file of a rank that cannot write it itself."""
    state, pid = state_of(report), report["pid"]
    head = f"rank {report['rank']} on {report['host']}, process {pid}: {state}"
    lines = [f"{head} (written by rank {by})"]
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        lines += [line for line in status if line.startswith(("State:", "Threads:", "VmRSS:"))]
    for name in ("wchan", "syscall", "stack"):  # if this user may read them
        with contextlib.suppress(OSError):
            lines.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
    return "\n".join(lines) + "\n"


def read_sign(text: str) -> Sign:
    """The sign in a rank's file. faulthandler writes the main thread, the oldest, last."""
    if not text.strip():
        return Sign("silent")
    if match := _SPOKEN_FOR.match(text):
        return Sign(match[1], stack=text)
    stack = _THREAD.split(text)[-1]
    for file, line, function in _FRAME.findall(stack):
        if file.startswith("<") or (file.startswith(_STDLIB) and not _PACKAGES.search(file)):
            continue
        return Sign("running", f"{file}:{line} in {function}", file.startswith(WAITS), stack)
    return Sign("running", stack=stack)


def blame(signs: Mapping[int, Sign]) -> int | None:
    """The rank that the others wait for, if one stands out: it does not run, or it is the only one
    that does not wait."""
    for state in AWAY:
        for rank, sign in signs.items():
            if sign.state == state:
                return rank
    busy = [rank for rank, sign in signs.items() if not sign.waits]
    return busy[0] if len(busy) == 1 else None


def sentence(
    seconds: float,
    suspect: int | None,
    reports: Sequence[Mapping[str, Any]],
    signs: Mapping[int, Sign],
) -> str:
    """The message of a hang, in one line."""
    text = f"no step for {seconds:.0f} s"
    if suspect is None:
        return f"{text}; no rank stands out; see the stacks in the attempt's folder"
    sign = signs[suspect]
    what = AWAY.get(sign.state) or (f"is at {sign.where}" if sign.where else "is running")
    return f"{text}; rank {suspect} on {reports[suspect]['host']} {what}"
