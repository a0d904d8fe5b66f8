"""The stacks of real processes that look like ranks."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sites import SUPPORT
from stub_ranks import StubRanks

from hpcddp.stacks import stack_reader
from hpcddp.stacks.rank_processes import ranks_here
from hpcddp.stacks.stack_reader import RankStack

Start = Callable[..., StubRanks]
STUB = str(SUPPORT / "stub_rank.py")
SPIED = """\
Process 7: python train.py
Python v3.11.2 (/usr/bin/python3.11)

Thread 8 (idle): "pin memory"
    get (queue.py:171)
Thread 7 (active): "MainThread"
    step (model.py:12)
    <module> (train (2).py:3)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def run(*modes: str) -> StubRanks:
        started.append(StubRanks(tmp_path / "toy-1", list(modes)))
        return started[-1]

    yield run
    for ranks in started:
        ranks.end()


def read(tmp_path: Path, attempt: int = 1) -> list[RankStack]:
    return stack_reader.here(str(tmp_path / "toy-1"), attempt)


def functions(stack: RankStack) -> list[str]:
    """The functions of the stub, the innermost first."""
    return [name for file, _, name in stack.frames if file == STUB]


def test_ranks_answer_also_with_pythons_lock_held(start: Start, tmp_path: Path) -> None:
    ranks = start("wait", "hold")
    for _ in range(2):  # and go on as before
        waits, holds = read(tmp_path)
        assert functions(waits) == ["wait_for_others", "main", "<module>"]
        assert functions(holds) == ["hold_the_lock", "main", "<module>"]
    assert [process.poll() for process in ranks.processes] == [None, None]
    assert [s.pid for s in (waits, holds)] == [process.pid for process in ranks.processes]
    assert read(tmp_path, attempt=2) == []


def test_a_rank_that_cannot_answer_says_why(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = start("wait", "mute", "shell")
    monkeypatch.setattr(os, "defpath", "")
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    os.waitpid(ranks.processes[0].pid, os.WUNTRACED)  # until it has stopped
    stopped, mute, shell = read(tmp_path)
    assert stopped.state == "is stopped (SIGSTOP)" and not stopped.frames
    assert "has not imported torch, or has no hpcddp beside it" in mute.reason
    assert shell.reason.startswith("bash is not Python; a debugger in `hpcddp shell`")
    os.kill(ranks.processes[0].pid, signal.SIGCONT)


def test_py_spy_reads_a_rank_that_does_not_answer(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text(f"#!/bin/bash\necho \"$*\" >{tmp_path}/asked\ncat <<'EOF'\n{SPIED}EOF\n")
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{spy.parent}:{os.environ['PATH']}")
    ranks = start("mute")
    (stack,) = read(tmp_path)
    assert stack.frames == (("model.py", 12, "step"), ("train (2).py", 3, "<module>"))
    assert not stack.reason
    pid = ranks.processes[0].pid
    assert (tmp_path / "asked").read_text() == f"dump --nonblocking --pid {pid}\n"
    spy.write_text("#!/bin/bash\necho 'Permission denied: try sudo' >&2; exit 1\n")
    assert "py-spy fails: Permission denied: try sudo" in read(tmp_path)[0].reason


def test_helpers_and_shells_of_a_rank_are_not_the_rank(start: Start, tmp_path: Path) -> None:
    ranks = start("wait")
    rank = ranks_here(str(tmp_path / "toy-1"), 1)[0]
    for extra in ({}, {"HPCDDP_SHELL": "1"}):  # a younger process of the rank, and one of a shell
        environ = {**rank.environment(), **extra}
        with subprocess.Popen(
            [sys.executable, STUB, "wait"], env=environ, stdout=subprocess.PIPE
        ) as other:  # fmt: skip
            assert other.stdout and other.stdout.readline() == b"up\n"
            assert [s.pid for s in read(tmp_path)] == [ranks.processes[0].pid]
            other.kill()


def test_a_forked_rank_is_found_with_its_own_variables(start: Start, tmp_path: Path) -> None:
    """As in an attempt after the one for which its parent was started."""
    ranks = start("forked")
    assert ranks_here(str(tmp_path / "toy-1"), 1) == {}
    rank = ranks_here(str(tmp_path / "toy-1"), 2)[0]
    assert rank.pid == ranks.processes[0].pid
    assert (rank.environment()["MASTER_PORT"], rank.environment()["NOTE"]) == ("7", "a=b c")


def test_lines_between_nodes_are_short_and_keep_all(start: Start, tmp_path: Path) -> None:
    start("wait", "hold")
    lines = list(stack_reader.lines(str(tmp_path / "toy-1"), 1))
    assert max(map(len, lines)) < 1024
    noise = "srun: error: n3: task 2: Exited\n{}\n[]\n"
    again = stack_reader.from_lines(noise + "\n".join(lines))
    assert [functions(stack)[0] for stack in again] == ["wait_for_others", "hold_the_lock"]
