"""The lines of ranks under mpirun, which writes their output in tagged pieces."""

import os
import shutil
import subprocess
import sys

import pytest

from hpcddp.launch.mpirun_output import Lines

# mpirun's output -> the log.
CASES = {
    "whole lines": (b"[1,0]<stdout>:a b\n[1,11]<stderr>:c\n", b" 0: a b\n11: c\n"),
    "another rank within a line": (
        b"[1,0]<stdout>:zero[1,1]<stdout>:one\n[1,0]<stdout>:\n",
        b" 1: one\n 0: zero\n",
    ),
    "pieces of one line": (b"[1,2]<stdout>:AB[1,2]<stderr>:CD[1,2]<stdout>:\n", b" 2: ABCD\n"),
    "empty lines, and spaces": (b"[1,3]<stdout>:\n[1,3]<stdout>:  x \n", b" 3: \n 3:   x \n"),
    "words of mpirun": (b"mpirun: [n1:7] is\n[1,0]<stdout>:a\n", b"mpirun: [n1:7] is\n 0: a\n"),
    "what looks like a tag": (b"[1,0]<stdout>:x[1,2] [a,1]<b>:y\n", b" 0: x[1,2] [a,1]<b>:y\n"),
    "no newline at the end": (b"[1,1]<stdout>:b[1,0]<stdout>:a", b" 0: a\n 1: b\n"),
    "a later Open MPI": (b"[prterun-n1-77@1,5]<stdout>: five\n", b" 5: five\n"),
    "no text": (b"mpirun [1,0]\n", b"mpirun [1,0]\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_become_lines(name: str, size: int) -> None:
    given, log = CASES[name]
    lines = Lines(12)
    parts = [given[i : i + size] for i in range(0, len(given), size)]
    said = b"".join(line for part in parts for line in lines.feed(part))
    assert said + b"".join(lines.finish()) == log


# Rank 1 writes its line while rank 0 is within one.
RANK = r"""
import os, sys, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
time.sleep(rank)
os.write(1, f"rank {rank}, ".encode())
time.sleep(2 - 2 * rank)
os.write(1, b"the end\n")
"""


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun, which is installed with Slurm")
def test_the_output_of_mpirun_itself() -> None:
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    how = ("mpirun", "-n", "2", "--oversubscribe", "--tag-output", sys.executable, "-c", RANK)
    raw = subprocess.run(how, env=environ, capture_output=True, check=True).stdout
    assert b"rank 0, [" in raw, raw  # the fault is there
    lines = Lines(2)
    said = [*lines.feed(raw), *lines.finish()]
    assert said == [b"1: rank 1, the end\n", b"0: rank 0, the end\n"]


def test_a_line_is_written_when_it_is_complete_and_a_stop_signal_ends_nothing() -> None:
    command = [sys.executable, "-P", "-m", "hpcddp.launch.mpirun_output", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as labeller:
        assert labeller.stdin and labeller.stdout
        os.write(labeller.stdin.fileno(), b"[1,0]<stdout>:a\n")
        assert labeller.stdout.readline() == b"0: a\n"
        labeller.terminate()
        os.write(labeller.stdin.fileno(), b"[1,1]<stdout>:b\n")
        labeller.stdin.close()
        assert labeller.stdout.read() == b"1: b\n"
    assert labeller.returncode == 0
