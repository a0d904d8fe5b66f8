"""Into a job on the real Slurm: the stacks of its ranks, and a shell beside one."""

import json
import os
import signal
import sys
from typing import Any

import pytest

from hpcddp.stacks.rank_processes import ranks_here

from .desk import Desk, wait_for

HANG = """
import os, time
import torch, torch.distributed as dist

def read_data():
    open("sleeps", "w").close()
    time.sleep(600)

dist.init_process_group("gloo")
if dist.get_rank() == 3:
    read_data()
dist.all_reduce(torch.ones(2))
"""
SIZE = ("--nodes", "2", "--gpus", "2")


def groups(desk: Desk) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(desk("stacks", "last", "--json"))["groups"]
    return found


def hang(desk: Desk, *words: str) -> str:
    """A job whose rank 3 sleeps, while the others wait for it; the name of its run."""
    (desk.folder / "hang.py").write_text(HANG)
    job = ("submit", "--no-snapshot", *SIZE, *words, "--detach", "--json")
    run = json.loads(desk(*job, "--", sys.executable, "hang.py").splitlines()[0])["run"]
    wait_for((desk.folder / "sleeps").exists)
    wait_for(lambda: [g["ranks"] for g in groups(desk)] == [[0, 1, 2], [3]])
    return str(run)


@pytest.mark.parametrize("launcher", ["srun", pytest.param("fork", marks=pytest.mark.full)])
def test_ranks_that_hang_are_grouped(desk: Desk, launcher: str) -> None:
    run = hang(desk, "--launcher", launcher)
    waiting, alone = groups(desk)
    assert waiting["hosts"] == desk.nodes[:2] and alone["hosts"] == [desk.nodes[1]]
    assert "all_reduce" in [frame["function"] for frame in waiting["frames"]]
    assert alone["frames"][0]["function"] == "read_data"
    asleep = ranks_here(str(desk.run(run).path), 1)[3]
    os.kill(asleep.pid, signal.SIGSTOP)
    done = desk.result("stacks", run)
    assert done.returncode == 4 and f"rank 3 on {desk.nodes[1]}" in done.stdout, done.stderr
    assert "is stopped (SIGSTOP)" in done.stdout
    os.kill(asleep.pid, signal.SIGCONT)


@pytest.mark.smoke("shell")
def test_a_shell_has_the_ranks_environment(desk: Desk) -> None:
    run = hang(desk)
    words = 'echo "$RANK $LOCAL_RANK $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"; pwd; exit 7\n'
    done = desk.result("shell", run, "--rank", "3", text=words)
    lines = done.stdout.splitlines()
    assert done.returncode == 7, done.stderr
    assert lines == [f"3 1 {desk.nodes[1]} 0,1", str(desk.folder)]
    assert [g["ranks"] for g in groups(desk)] == [[0, 1, 2], [3]]  # and nothing else has changed


@pytest.mark.smoke("stacks")
def test_a_task_answers_while_it_trains(desk: Desk) -> None:
    desk.submit(*SIZE, "--set", "max_steps=100000")
    desk.training(step=5)
    ranks = sorted(rank for group in groups(desk) for rank in group["ranks"])
    assert ranks == [0, 1, 2, 3]
    step = desk.status()["step"]
    desk.training(step=step + 5)


def test_a_waiting_run_is_one_error(desk: Desk) -> None:
    run = desk.submit(*SIZE, "--sbatch", "hold=true")
    done = desk.result("stacks", run)
    assert done.returncode == 2 and "no rank runs: the run is PENDING" in done.stderr
    desk("cancel", run)
