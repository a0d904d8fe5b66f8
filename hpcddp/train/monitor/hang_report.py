"""The evidence of a hang: stacks, the state of processes, and the rank at fault.

Every rank writes its threads' stacks into its own file. The first rank of a node that detects the
hang also sends a signal to the node's other ranks, which faulthandler handles in C: it shows the
main thread even where that holds Python's lock. For a rank that does not respond it writes the
facts of /proc. The first rank of all writes the summary: hang.json, and error.json for `status`.

All files are synced: other nodes must see them at once, and the process is about to end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcddp.attempt import error_record
from hpcddp.processes import memory_file
from hpcddp.rundir import AttemptDir, token, write_json
from hpcddp.train.monitor.rank_stacks import blame, read_sign, sentence, speak_for, state_of
from hpcddp.train.rank.world import World

SIGNAL = signal.SIGRTMIN + 4
SETTLE = 0.5  # seconds for a rank to handle the signal
WAIT = 3.0  # seconds for all ranks to write their stacks
LOOK = 0.1


class Evidence:
    """One rank's part in it; call `open` before the training, in the main thread."""

    def __init__(self, world: World, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._reports = world.reports
        self._mine = world.reports[world.rank.world_rank]
        self._path = attempt.stack(self._mine["rank"])
        self._fd: int | None = None
        self._answers = False  # this rank handles the signal
        # An attempt's folder may be used twice, if the user starts the ranks by hand.
        main = world.reports[0]
        self._life = f"{main['pid']}-{main['start']}"

    @property
    def begun(self) -> bool:
        """Whether a rank has detected the hang."""
        return self._mark("all").exists()

    def _mark(self, name: str) -> Path:
        return self._attempt.stacks / f".{name}-{self._life}"

    def open(self) -> None:
        """Open the file before the training: that may be impossible in a hang."""
        self._attempt.stacks.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o644)
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:  # else the user's own
            # The main thread alone: the others run meanwhile, and to read their frames without
            # Python's lock may end the rank by SIGSEGV (github.com/python/cpython/issues/116008).
            faulthandler.register(SIGNAL, self._fd, all_threads=False)
            self._answers = True

    def close(self) -> None:
        """Close the file, and remove it if empty."""
        if self._fd is None:
            return
        if self._answers:
            faulthandler.unregister(SIGNAL)
            signal.signal(SIGNAL, signal.SIG_IGN)  # a sibling may still send it
        descriptor, self._fd = self._fd, None
        with contextlib.suppress(OSError):
            empty = os.fstat(descriptor).st_size == 0
            os.close(descriptor)
            if empty:
                self._path.unlink()
                self._attempt.stacks.rmdir()

    def gather(self, step: int, seconds: float) -> None:
        """Write all evidence that this rank has of a hang.

        Args:
            step: the last optimizer step taken.
            seconds: since then.
        """
        first = self._claim("all")
        self._dump()
        if self._claim(self._mine["host"]):
            self._look_after_node()
        if not first and _wait(self._attempt.hang.exists, 2 * WAIT):
            return
        _wait(self._written(self._reports), WAIT)
        with contextlib.suppress(OSError):
            self._tell(step, seconds)

    def _claim(self, name: str) -> bool:
        """Whether this rank is the first to do it."""
        try:
            os.close(os.open(self._mark(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        except OSError:  # no folder, or a full disk: write as much as possible
            return True
        return True

    def _dump(self) -> None:
        """Write the stacks of all threads, which hold still: this one has Python's lock."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError), open(memory_file("stacks"), "w+b") as copy:
            faulthandler.dump_traceback(copy, all_threads=True)
            copy.seek(0)
            os.write(self._fd, copy.read())  # at once: the answer to the signal may come between
            os.fsync(self._fd)

    def _written(self, ranks: Sequence[dict[str, Any]]) -> Callable[[], bool]:
        """A test whether the stacks of these ranks exist and no longer grow."""
        before: list[int] = []

        def look() -> bool:
            nonlocal before
            now = [len(_text(self._attempt.stack(r["rank"]))) for r in ranks]
            same, before = now == before, now
            return same and all(now)

        return look

    def _look_after_node(self) -> None:
        """Make the node's other ranks write their stacks; for those that cannot, write why."""
        siblings = [r for r in self._reports if r != self._mine and self._near(r)]
        for report in siblings:
            if state_of(report) != "gone" and not _text(self._attempt.stack(report["rank"])):
                with contextlib.suppress(OSError):
                    os.kill(report["pid"], SIGNAL)
        _wait(self._written(siblings), SETTLE)
        for report in siblings:
            with contextlib.suppress(OSError):
                self._speak_for(report)

    def _near(self, report: dict[str, Any]) -> bool:
        """Whether its process id is valid here: same host, same namespace."""
        return all(report[name] == self._mine[name] for name in ("host", "space"))

    def _speak_for(self, report: dict[str, Any]) -> None:
        """Sync another rank's stacks, or write the facts of /proc."""
        fd = os.open(
            self._attempt.stack(report["rank"]), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644
        )
        try:
            if os.fstat(fd).st_size == 0:
                os.write(fd, speak_for(report, self._mine["rank"]).encode())
            os.fsync(fd)
        finally:
            os.close(fd)

    def _tell(self, step: int, seconds: float) -> None:
        """Write hang.json, unless another rank did, and error.json."""
        signs = {r["rank"]: read_sign(_text(self._attempt.stack(r["rank"]))) for r in self._reports}
        suspect = blame(signs)
        ranks = [
            {"rank": n, "host": self._reports[n]["host"], "state": s.state, "where": s.where}
            for n, s in signs.items()
        ]
        accused = None
        if suspect is not None:
            accused = {name: ranks[suspect][name] for name in ("rank", "host")}
        report = {"step": step, "seconds": round(seconds, 1), "ranks": ranks, "suspect": accused}
        aside = self._attempt.hang.with_name(f".hang.{token(4)}")
        write_json(aside, report)
        try:
            os.link(aside, self._attempt.hang)
        except FileExistsError:
            return
        finally:
            aside.unlink(missing_ok=True)
        message = sentence(seconds, suspect, self._reports, signs)
        record = {
            "rank": None, "host": self._mine["host"], **(accused or {}),
            "type": "Hang", "kind": "hang", "message": message, "step": step,
            "traceback": signs[suspect].stack if suspect is not None else "", "time": time.time(),
        }  # fmt: skip
        error_record.claim(self._attempt, record)
        os.write(2, f"rank {self._mine['rank']}: {message}\n".encode())  # print() may block


def _text(path: Path) -> str:
    """A file as it is now on all nodes; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(LOOK)
    return True
