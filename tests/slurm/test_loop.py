"""A person's own loop survives what a job survives, on the real Slurm; a framework's too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sites import SUPPORT

from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir

from .conftest import Slurm
from .desk import HPCDDP

LOOPS = {
    "loop": ("loop_script.py", "25", "0.05"),
    "lightning": ("lightning_script.py", "25", "plain", "0.05"),
    "transformers": ("transformers_script.py", "25", "sparse", "0.05"),
    "accelerate": ("accelerate_script.py", "25", "0.05"),
}


FEW = ("--preempt", "1", "--cancel", "1")
ALL = ("--preempt", "3", "--timeout", "1", "--cancel", "1", "--kill-node", "1")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("loop", "faults"),
    [("loop", FEW), *(pytest.param(loop, ALL, marks=pytest.mark.full) for loop in LOOPS)],
    ids=["few", *LOOPS],
)
def test_it_loses_no_step_and_ends_as_if_undisturbed(
    slurm: Slurm, tmp_path: Path, loop: str, faults: tuple[str, ...]
) -> None:
    script, *words = LOOPS[loop]
    size = ("--nodes", "2", "--gpus", "2", "--watch", "3", "--seed", "11", "--json")
    done = subprocess.run(
        [HPCDDP, "rehearse", *size, *faults, "--", sys.executable, str(SUPPORT / script), *words],
        cwd=tmp_path, env=slurm.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, (found, done.stderr)
    assert found["weights_equal"] and found["order_equal"] and not found["steps_needless"]
    assert [f["fault"] for f in found["faults"] if f["steps_lost"]] in ([], ["kill-node"])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "faults",
    [
        {"preempt": 1, "cancel": 1},
        pytest.param(
            {"preempt": 2, "timeout": 1, "cancel": 1, "kill-node": 1, "crash": 1},
            marks=pytest.mark.full,
        ),
    ],
    ids=["few", "all"],
)
def test_a_program_without_the_lines_comes_back_each_time(
    slurm: Slurm, tmp_path: Path, faults: dict[str, int]
) -> None:
    # Not one long sleep, which would be over when a program goes on that stood still so long.
    short = "import time\nfor _ in range(60):\n    time.sleep(0.1)\nprint('over')\n"
    (tmp_path / "naive.py").write_text(short)
    counts = [word for kind, count in faults.items() for word in (f"--{kind}", str(count))]
    # Of this seed no fault is in the last half second, in which a slow machine would miss it.
    how = ("--nodes", "2", "--gpus", "2", "--watch", "3", "--seed", "19", "--json")
    done = subprocess.run(
        [HPCDDP, "rehearse", *how, *counts, "--runs", "kept", "--", sys.executable, "naive.py"],
        cwd=tmp_path, env=slurm.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and found["passed"], (found, done.stderr)
    assert found["weights_equal"] is None and not found["steps"]
    alone, disturbed = sorted((tmp_path / "kept").glob("naive-*"), key=lambda p: p.stat().st_ctime)
    assert len(ledger.attempts(RunDir(alone))) == 1
    attempts = ledger.attempts(RunDir(disturbed))
    assert len(attempts) == 1 + len(found["faults"]) == 1 + sum(faults.values())
    assert attempts[-1].cause == "done"
