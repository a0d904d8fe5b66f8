"""The stacks of ranks on this node: by their own answers, or by py-spy for others.

py-spy (https://github.com/benfred/py-spy) reads the memory of any Python process, if the node lets
a user do so (ptrace(2)).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hpcddp.rundir import parse_lines
from hpcddp.stacks.answer import SIGNAL
from hpcddp.stacks.rank_processes import RankProcess, ranks_here, this_node

WAIT = 5.0  # seconds for all ranks of the node to answer
LOOK = 0.02  # seconds between two looks
LONGEST = 300  # characters of a text in a line
SPY = 15.0  # seconds for py-spy to read one rank
AWAY = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "waits for a disk",
        "Z": "has ended", "X": "has ended"}  # fmt: skip
DEAF = "TtZX"  # a signal waits there until the process goes on
_HEAD = "most recent call first"  # a late answer to an earlier request may come before the newest
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SPIED = re.compile(r"^    (.+?) \((.+):(\d+)\)$", re.MULTILINE)

Frame = tuple[str, int, str]  # file, line, function


class RankStack(NamedTuple):
    """The stack of a rank's main thread, the innermost frame first, or why there is none."""

    rank: int
    host: str
    pid: int
    frames: tuple[Frame, ...]
    state: str = ""  # a state in which it cannot go on
    reason: str = ""  # why its stack cannot be read


def here(run_dir: str, attempt: int) -> list[RankStack]:
    """The stacks of an attempt's ranks on this node."""
    return list(read(ranks_here(run_dir, attempt).values()))


def lines(run_dir: str, attempt: int) -> Iterator[str]:
    """The same as JSON lines, each shorter than the 1 KiB that srun keeps together: a line of a
    rank, then one of each of its frames."""
    for stack in here(run_dir, attempt):
        yield json.dumps(stack._replace(frames=(), reason=stack.reason[:LONGEST])._asdict())
        for file, line, name in stack.frames:
            frame = (file[-LONGEST:], line, name[:LONGEST])
            yield json.dumps({"rank": stack.rank, "frame": frame}, ensure_ascii=False)


def from_lines(text: str) -> list[RankStack]:
    """The stacks that such lines tell; all other lines are skipped."""
    stacks: dict[int, RankStack] = {}
    for data in parse_lines(text.splitlines()):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if "frame" in data:
                before = stacks[data["rank"]]
                file, line, name = data["frame"]
                frames = (*before.frames, (file, line, name))
                stacks[before.rank] = before._replace(frames=frames)
            elif data["rank"] not in stacks:
                stacks[data["rank"]] = RankStack(**{**data, "frames": ()})
    return list(stacks.values())


def read(processes: Iterable[RankProcess]) -> Iterator[RankStack]:
    """The stacks of these processes, in their order."""
    processes = list(processes)
    letters = {process.pid: _letter(process.pid) for process in processes}
    answers = ask([process for process in processes
                   if process.answer and letters[process.pid] not in DEAF])  # fmt: skip
    host = this_node()
    for process in processes:
        frames, state, reason = answers.get(process.pid, ()), "", ""
        if not frames:
            state = AWAY.get(letters[process.pid], "")
            frames, reason = _spied(process, "" if state else _silence(process))
        yield RankStack(process.rank.world_rank, host, process.pid, frames, state, reason)


def ask(processes: list[RankProcess]) -> dict[int, tuple[Frame, ...]]:
    """Process id -> its answer, of those that answer in time."""
    end = time.monotonic() + WAIT
    with contextlib.ExitStack() as stack:
        files = {}
        for process in processes:
            with contextlib.suppress(OSError):
                file = os.open(process.answer, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, file)
                if _lock(file, end) and _handles(process.pid):
                    os.ftruncate(file, 0)
                    _send(process.pid)
                    files[process.pid] = file
        texts = _complete(files, end)
    newest = {pid: text.rpartition(_HEAD)[2] for pid, text in texts.items()}
    return {
        pid: tuple((file, int(line), name) for file, line, name in _FRAME.findall(text))
        for pid, text in newest.items()
    }


def _lock(file: int, end: float) -> bool:
    """Lock a file of answers against other readers."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(LOOK)
        else:
            return True


def _handles(pid: int) -> bool:
    """Whether a process handles the signal, which would end it otherwise (proc(5), status)."""
    mask = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(mask, 16) >> (SIGNAL - 1) & 1)


def _send(pid: int) -> None:
    """Send the signal to a process's main thread (tgkill(2)): another thread's handler would write
    that thread's stack."""
    import ctypes

    try:
        send = ctypes.CDLL(None).tgkill  # glibc 2.30
    except AttributeError:
        os.kill(pid, SIGNAL)  # the kernel prefers the main thread
    else:
        send(pid, pid, int(SIGNAL))


def _complete(files: dict[int, int], end: float) -> dict[int, str]:
    """Process id -> the text of its file, once that no longer grows."""
    texts: dict[int, str] = {}
    sizes = dict.fromkeys(files, 0)
    while len(texts) < len(files) and time.monotonic() < end:
        time.sleep(LOOK)
        for pid in files.keys() - texts.keys():
            size = os.fstat(files[pid]).st_size
            if size and size == sizes[pid]:
                texts[pid] = os.pread(files[pid], size, 0).decode(errors="replace")
                os.ftruncate(files[pid], 0)
            sizes[pid] = size
    return texts


def _letter(pid: int) -> str:
    """The state of a process (proc(5), stat)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _silence(process: RankProcess) -> str:
    """Why a Python process gives no answer."""
    if process.answer:
        return f"it gave no answer in {WAIT:g} s, and "
    return "its Python has not imported torch, or has no hpcddp beside it, and "


def _spied(process: RankProcess, silence: str) -> tuple[tuple[Frame, ...], str]:
    """The frames of a rank that does not answer, by py-spy; else why there are none."""
    if not process.is_python:
        name = Path(process.program).name
        return (), f"{name} is not Python; a debugger in `hpcddp shell` reads its stack"
    paths = [environ.get("PATH", "") for environ in (process.environ, os.environ)]
    paths += [str(Path(sys.executable).parent), os.defpath]
    spy = shutil.which("py-spy", path=os.pathsep.join(filter(None, paths)))
    if spy is None:
        return (), f"{silence}py-spy is not installed on the node"
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--pid", str(process.pid)],
            capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
            timeout=SPY, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"{silence}py-spy fails: {error}"
    if frames := spied_frames(done.stdout):
        return frames, ""
    words = next((line.strip() for line in done.stderr.splitlines() if line.strip()), "no stack")
    return (), f"{silence}py-spy fails: {words}"


def spied_frames(text: str) -> tuple[Frame, ...]:
    """The frames of the main thread in the output of `py-spy dump`."""
    threads = re.split(r"^(?=Thread )", text, flags=re.MULTILINE)[1:]
    main = next((t for t in threads if '"MainThread"' in t.partition("\n")[0]), text)
    return tuple((file, int(line), name) for name, file, line in _SPIED.findall(main))
