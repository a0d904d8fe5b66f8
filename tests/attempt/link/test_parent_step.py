"""The srun of the parents: its lines, and its refusals."""

import os
import select
import sys
import time
from pathlib import Path

import pytest

from hpcddp.attempt.link import parent_step
from hpcddp.attempt.link.parent_step import ParentStep

# Slurm cannot create the step so often as its file has letters.
SRUN = """
import pathlib, sys
left = pathlib.Path("left")
text = left.read_text()
print("before", flush=True)
if text:
    left.write_text(text[1:])
    sys.exit("srun: error: Unable to create step for job 7: Invalid generic resource (gres)")
print("the step runs")
sys.exit(3)
"""


def ended(step: ParentStep) -> tuple[int, list[bytes]]:
    """Its exit code, and all its lines."""
    lines, until = [], time.monotonic() + 30
    while (code := step.code) is None or not step.closed:
        assert time.monotonic() < until
        if select.select([step], [], [], 0.05)[0]:
            lines += step.lines()
    return code, lines


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parent_step, "PAUSE", 0.05)
    return tmp_path


@pytest.mark.parametrize(("refusals", "code"), [(0, 3), (2, 3), (9, 1)])
def test_a_step_that_cannot_be_created_is_tried_again(
    folder: Path, refusals: int, code: int
) -> None:
    folder.joinpath("left").write_text("x" * refusals)
    step = ParentStep([sys.executable, "-c", SRUN], os.environ, quiet=False)
    found, lines = ended(step)
    tries = 1 + min(refusals, parent_step.REFUSALS)
    assert (found, lines.count(b"before")) == (code, tries)
    assert (b"the step runs" in lines) is (code == 3)


def test_a_killed_step_is_not_tried_again(folder: Path) -> None:
    step = ParentStep(["sh", "-c", "echo one; exec sleep 60"], os.environ, quiet=False)
    assert select.select([step], [], [], 10)[0] and step.lines() == [b"one"]
    step.kill()
    assert ended(step) == (-9, [])


def test_a_quiet_step_leaves_out_the_words_of_srun(folder: Path) -> None:
    step = ParentStep(
        ["sh", "-c", "echo srun: error: n2 is away; echo 0: up"], os.environ, quiet=True
    )
    assert ended(step) == (0, [b"0: up"])


def test_a_program_that_is_not_there_is_an_error(folder: Path) -> None:
    with pytest.raises(OSError):
        ParentStep(["/nowhere/srun"], os.environ, quiet=False)
