"""The processes of an attempt's ranks on this node, by their environment (proc(5))."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpcddp.processes import start_of
from hpcddp.stacks.answer import ENVIRON, NAME, SHELL
from hpcddp.topology import Rank

# Its rank, world size, ranks of its node, and attempt; in older versions without the attempt.
_ANSWER = re.compile(rf"/memfd:{NAME}-(\d+)-(\d+)-(\d+)(?:-(\d+))? ")
# Helpers of Python's multiprocessing, which have the environment of their rank.
_HELPER = re.compile(rb"multiprocessing[./](spawn|forkserver|resource_tracker)")


class RankProcess(NamedTuple):
    """The process of a rank."""

    rank: Rank
    pid: int
    start: int  # clock ticks since boot
    program: str  # the path of its program
    environ: dict[str, str]  # when its program started, or when it was forked
    answer: str  # the file of its answers, "" if it does not answer

    @property
    def is_python(self) -> bool:
        return Path(self.program).name.startswith("python")

    def environment(self) -> dict[str, str]:
        """Its environment, with its rank."""
        return {**self.environ, **self.rank.to_env()}


def this_node() -> str:
    """The name of this node, as Slurm has it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def ranks_here(run_dir: str, attempt: int) -> dict[int, RankProcess]:
    """Rank -> its process, of an attempt of a run.

    A rank may have several processes: its main one is the oldest that answers, or the oldest
    Python, or the oldest.
    """
    ranks: dict[int, RankProcess] = {}
    for process in _all(run_dir, attempt):
        number = process.rank.world_rank
        if number not in ranks or _order(process) < _order(ranks[number]):
            ranks[number] = process
    return dict(sorted(ranks.items()))


def _order(process: RankProcess) -> tuple[bool, bool, int, int]:
    return not process.answer, not process.is_python, process.start, process.pid


def _all(run_dir: str, attempt: int) -> Iterator[RankProcess]:
    """All processes with a rank of the attempt in their environment."""
    node = os.environ.get("SLURMD_NODENAME")
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            environ = _environ(path)
            if SHELL in environ or not _same(environ.get("HPCDDP_RUN_DIR", ""), run_dir):
                continue
            if node and environ.get("SLURMD_NODENAME", node) != node:  # nodes that share a machine
                continue
            if _HELPER.search((path / "cmdline").read_bytes()):
                continue
            process = _rank_process(path, environ)
            if process and process.environ.get("HPCDDP_ATTEMPT") == str(attempt):
                yield process


def _forked(path: Path) -> dict[str, str]:
    """The variables of a forked rank; empty for another process."""
    for file in (path / "fd").iterdir():
        with contextlib.suppress(OSError):
            if str(file.readlink()).startswith(f"/memfd:{ENVIRON} "):
                return _variables(file.read_bytes())
    return {}


def _environ(path: Path) -> dict[str, str]:
    return _variables((path / "environ").read_bytes())


def _variables(data: bytes) -> dict[str, str]:
    text = data.decode(errors="surrogateescape")
    return dict(word.partition("=")[::2] for word in text.split("\0") if "=" in word)


def _same(folder: str, run_dir: str) -> bool:
    """Whether both are the same run folder; only one of the same name is looked up."""
    if folder == run_dir:
        return True
    alike = Path(folder).name == Path(run_dir).name
    return alike and os.path.realpath(folder) == os.path.realpath(run_dir)


def _rank_process(path: Path, environ: dict[str, str]) -> RankProcess | None:
    """The process, if it is a rank's."""
    answer, rank, attempt = _answer(path)
    environ = _forked(path) or environ
    if attempt:  # an older version has not shown those of a forked rank
        environ["HPCDDP_ATTEMPT"] = attempt
    if rank is None and "RANK" in environ:
        with contextlib.suppress(Exception):  # it has a RANK of its own
            rank = Rank.from_env(environ)
    pid = int(path.name)
    start = start_of(pid)
    if rank is None or not start:
        return None
    program = str((path / "exe").readlink()).removesuffix(" (deleted)")
    return RankProcess(rank, pid, int(start), program, environ, answer)


def _answer(path: Path) -> tuple[str, Rank | None, str]:
    """The file of a rank's answers, and the rank and the attempt that its name says."""
    for file in (path / "fd").iterdir():
        with contextlib.suppress(OSError):
            if match := _ANSWER.match(str(file.readlink())):
                number, size, here = map(int, match.groups()[:3])
                rank = Rank(number, size, number % here, here, number // here)
                return str(file), rank, match[4] or ""
    return "", None, ""
