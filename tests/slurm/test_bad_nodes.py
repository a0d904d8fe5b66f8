"""A node with a fault is left out: by the next attempt, and by the next job."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from .desk import LONG, Desk
from .test_doctor import FULL, throttled

# A driver that has lost count on one node.
SMI = """\
#!/bin/sh
[ "$SLURMD_NODENAME" = {host} ] && errors=2 || errors=0
for gpu in 1 2 3 4; do echo "A100, GPU-$gpu, 550, 81920, $errors, 41, 0x0"; done
"""


@pytest.fixture
def faulty(desk: Desk, tmp_path: Path) -> Desk:
    """The second node has a GPU with memory errors."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI.format(host=desk.nodes[1]))
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{desk.slurm.environ['PATH']}"
    return replace(desk, slurm=replace(desk.slurm, environ=desk.slurm.environ | {"PATH": path}))


def test_a_node_with_a_faulty_gpu_is_left_out_and_remembered(faulty: Desk) -> None:
    desk, bad = faulty, faulty.nodes[1]
    slow = ("--set", "max_steps=100", "--set", "dataset.pause=0.1")
    run = desk.submit("--nodes", "2", "--gpus", "1", "--detach", *slow)
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    first, *_, last = desk.attempts(run)
    assert (first.cause, last.cause) == ("bad node", "done")
    assert bad not in last.nodes
    assert f"{bad}: GPU 0 has uncorrected memory errors (2)" in desk("why", run)
    (row,) = json.loads(desk("nodes", "--json"))["nodes"]
    assert (row["host"], row["count"]) == (bad, 1)
    done = desk.result("submit", "toy", "--nodes", "2", "--gpus", "1", "--dry-run")
    assert f"#SBATCH --exclude={bad}\n" in done.stdout
    assert "GPU 0 has uncorrected memory errors" in done.stderr
    pair = f"nodelist={desk.hosts(2)}"
    run = desk.submit("--nodes", "2", "--gpus", "1", "--sbatch", pair, *LONG, "--detach")
    desk.until(lambda s: "the ranks continue" in desk("logs", run), run)  # it must have this node
    desk("cancel", run)
    (row,) = json.loads(desk("nodes", "--json"))["nodes"]
    assert (row["host"], row["count"]) == (bad, 2)
    desk("nodes", "--trust", bad)
    assert "#SBATCH --exclude" not in desk(
        "submit", "toy", "--nodes", "2", "--gpus", "1", "--dry-run"
    )


def test_a_spare_takes_the_place_of_a_node_with_a_faulty_gpu(faulty: Desk) -> None:
    slow = ("--set", "max_steps=100", "--set", "dataset.pause=0.1", "--spares", "1")
    run = faulty.submit("--nodes", "2", "--gpus", "1", "--detach", *slow)
    faulty.until(lambda s: s["state"] == "COMPLETED", run)
    first, last = faulty.attempts(run)
    assert (first.cause, first.action, last.cause) == ("bad node", "here", "done")
    assert first.job_id == last.job_id and faulty.nodes[1] not in last.nodes
    assert re.search(rf"n\d for {faulty.nodes[1]}", faulty("why", run))


def test_a_slow_node_is_left_out_by_the_full_preflight(desk: Desk) -> None:
    slow = desk.nodes[1]
    with throttled(slow, "hpcddp.worker"):
        for _ in range(3):  # other tests may slow the others down as much
            run = desk.submit(*FULL, "--detach")
            if desk.until(lambda s: s["attempt"] > 1 or s["state"] == "COMPLETED")["attempt"] > 1:
                break
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    first, last = desk.attempts(run)
    assert (first.cause, last.cause) == ("bad node", "done") and slow not in last.nodes
    assert f"{slow} computes at " in desk("why", run)
    assert "preflight: " in desk("logs", run)
