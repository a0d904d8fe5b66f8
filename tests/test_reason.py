"""Why a program failed, as its log tells it."""

import sys

import pytest
from conftest import Site
from test_local import Command

from hpcddp import reason

GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def traceback(rank: int, end: str, mark: str = "") -> str:
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 3',
        "    x = 1",
        "",
        end,
    ]
    return "".join(f"{rank:2}: {mark}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ""),
        (traceback(0, GONE) + traceback(1, "ValueError: boom", "[rank1]: "),
         "rank 1: ValueError: boom"),
        (traceback(0, GONE, "[rank0]: "), ""),
        (traceback(3, "KeyboardInterrupt") + traceback(2, "own.Error: x"),
         "rank 3: KeyboardInterrupt"),
        # The second one is what it ended with; the first one was met on the way.
        (traceback(0, "KeyError: 'x'") + traceback(0, "OSError: full"), "rank 0: OSError: full"),
        # It printed one, and went on.
        (traceback(0, "KeyError: 'x'") + " 0: step\n" * 10, ""),
        (traceback(0, "KeyError: 'x'") + " 1: step\n" * 10, "rank 0: KeyError: 'x'"),
        (" 0: ValueError: is only a line\n", ""),
    ],
)  # fmt: skip
def test_the_exception_that_ended_the_first_rank(text: str, told: str) -> None:
    assert reason.raised(text) == told


def test_a_rank_that_gloo_ended() -> None:
    text = " 0: step 3\n11: terminate called without an active exception\n"
    assert reason.aborted(text).startswith("rank 11 was ended by a thread of gloo")
    assert reason.aborted(" 0: why terminate called without an active exception\n") == ""


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr', type=float)\n"
         "p.parse_args(['--lr', 'abc'])",
         "exit code 2; rank 0's last line: train.py: error: argument --lr: invalid float value"),
        ("d = {}\nd['x']", "(rank 0: KeyError: 'x'; "),
        ("raise SystemExit(3)", "exit code 3; the log is empty"),
    ],
)  # fmt: skip
def test_why_tells_what_a_program_said(
    site: Site, command: Command, script: str, told: str
) -> None:
    site.write("train.py", script)
    done = command("submit", "--set", "requeue.crashes=1", "--", sys.executable, "train.py")
    assert done.code == 1
    assert told in command("status", "last").out
    assert told.lstrip("(") in command("why", "last").out
