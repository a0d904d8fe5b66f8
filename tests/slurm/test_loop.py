"""A person's own loop survives what a job survives, on the real Slurm; a framework's too."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from own_loops import said, used
from sites import SUPPORT

from hpcddp.attempt import ledger
from hpcddp.observe import history
from hpcddp.rundir import RunDir

from .conftest import Slurm
from .desk import HPCDDP, Desk

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
    found = rehearsed(slurm, tmp_path, ("--seed", "11", *faults), *LOOPS[loop])
    assert found["weights_equal"] and found["order_equal"] and not found["steps_needless"]
    assert [f["fault"] for f in found["faults"] if f["steps_lost"]] in ([], ["kill-node"])


def rehearsed(
    slurm: Slurm, folder: Path, options: tuple[str, ...], script: str, *words: str
) -> dict[str, Any]:
    """The report of a rehearsal of a script of tests/support on 2 x 2, which must succeed."""
    size = ("--nodes", "2", "--gpus", "2", "--watch", "3", "--json")
    done = subprocess.run(
        [HPCDDP, "rehearse", *size, *options, "--", sys.executable, str(SUPPORT / script), *words],
        cwd=folder, env=slurm.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, (found, done.stderr)
    return found


@pytest.mark.full
def test_a_transformers_trainer_preempted_three_times_has_the_same_weights_and_losses(
    slurm: Slurm, tmp_path: Path
) -> None:
    """With dropout and gradient accumulation, on 2 x 2."""
    # Of this seed the preemptions are late: in steps, not in the first start.
    options = ("--preempt", "3", "--seed", "384", "--runs", "kept")
    script = ("transformers_script.py", "50", "sparse", "0.05")
    found = rehearsed(slurm, tmp_path, options, *script)
    assert found["passed"] and found["steps"] == 200
    assert found["weights_equal"] and found["order_equal"]
    assert found["steps_lost"] == 0 and [f["steps_lost"] for f in found["faults"]] == [0, 0, 0]
    folders = sorted((tmp_path / "kept").glob("*-*"), key=lambda p: p.stat().st_ctime)
    alone, preempted = (RunDir(folder) for folder in folders)
    assert [a.cause for a in ledger.attempts(preempted)] == [*["preempted"] * 3, "done"]
    assert sum(row.lost for row in history.summaries(preempted)) == 0
    # Each batch of a rank with its loss, and each rank's logged losses with a hash of its weights.
    for word, lines in (("took", 4 * 50 * 7), ("over", 4)):
        assert said(preempted, word) == said(alone, word)
        assert said(preempted, word).total() == lines
    assert set(said(preempted, "took").values()) == {1}


@pytest.mark.full
def test_a_transformers_trainer_goes_on_with_fewer_ranks_and_uses_each_sample_once(
    desk: Desk,
) -> None:
    script = (sys.executable, str(SUPPORT / "transformers_script.py"), "1", "sparse", "5")
    desk("submit", "--nodes", "2", "--gpus", "2", "--detach", "--", *script)
    desk.training()
    desk("stop", "last")
    stopped = desk.until(lambda s: s["state"] == "STOPPED")
    assert stopped["step"] in (1, 2, 3)  # of 4: two batches of 4 samples on each of 4 ranks
    desk("resume", "last", "--nodes", "2", "--gpus", "1", "--detach")
    ended = desk.until(lambda s: s["state"] == "COMPLETED")
    # Each rank of two has 13 batches of the epoch, and has used 4 of them for each step of four.
    left = 13 - 4 * stopped["step"]
    assert ended["step"] == stopped["step"] + -(-left // 2)
    assert used(desk.run()).keys() == set(range(103))
    assert used(desk.run()).total() == 104  # one completes the last batch


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
