"""What a process is known by, and its stack."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp import processes


def test_a_process_is_known_by_its_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert processes.start_of(child.pid) not in ("", processes.start_of(1))
        assert child.stdin
        child.stdin.close()
        while processes.start_of(child.pid):  # a zombie works no more
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert processes.start_of(child.pid) == ""


@pytest.mark.parametrize("inherited", [False, True])
def test_memory_is_shared_also_where_python_was_built_without_it(
    monkeypatch: pytest.MonkeyPatch, inherited: bool
) -> None:
    """As those of conda."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    file = processes.memory_file("hpcddp-test", inherited=inherited)
    try:
        path = f"/proc/self/fd/{file}"
        assert str(Path(path).readlink()) == "/memfd:hpcddp-test (deleted)"
        look = ["test", "-e", path]
        assert (subprocess.run(look, close_fds=False, check=False).returncode == 0) == inherited
    finally:
        os.close(file)


def leaf() -> None:
    """A call that may lie beyond the end of a chunk of the stack: it needs more than `deeper`."""


leaf.__code__ = leaf.__code__.replace(co_stacksize=64)


def worst(depths: range) -> int:
    """Most page faults of 1000 calls, over the depths of the stack at which they are made."""

    def deeper(more: int) -> int:
        if more:
            return deeper(more - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(1000):
            leaf()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return max(deeper(depth) for depth in depths)


def test_with_room_no_call_maps_memory_again_and_again() -> None:
    counted: Callable[[], int] = lambda: worst(range(300))  # noqa: E731
    assert processes.with_room(counted) < 100 <= 900 < counted()
