"""Programs of a user's own on the real Slurm."""

import json
import sys

import pytest

from hpcddp.attempt import ledger

from .desk import Desk, wait_for

# An all-reduce over all ranks, as any script for torchrun does it; told by rank 0.
SUM = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = torch.tensor([float(dist.get_rank())])
dist.all_reduce(rank)
print("rank", dist.get_rank(), "local", os.environ["LOCAL_RANK"], flush=True)
if dist.get_rank() == 0:
    open("told", "w").write(json.dumps([rank.item(), dist.get_world_size(), sys.argv[1:]]))
dist.barrier()
dist.destroy_process_group()
time.sleep(float(os.environ.get("LINGER", 0)) * (os.environ["HPCDDP_ATTEMPT"] == "1"))
"""
WORDS = ["a b", "$HOME", "*", "q'\"", "n\nl"]


def test_a_script_for_torchrun_runs_unmodified(desk: Desk) -> None:
    (desk.folder / "train.py").write_text(SUM)
    size = ("--nodes", "2", "--gpus", "2")
    desk("submit", "--no-snapshot", *size, "--follow", "--", sys.executable, "train.py", *WORDS)
    assert json.loads((desk.folder / "told").read_text()) == [6.0, 4, WORDS]
    (line,) = [x for x in desk("logs", "--rank", "3").splitlines() if "local" in x]
    assert line.startswith("3: rank 3 local 1")
    assert desk.status()["state"] == "COMPLETED"


def test_one_that_knows_nothing_of_preemption_starts_over(desk: Desk) -> None:
    (desk.folder / "train.py").write_text(SUM)
    again = f"resume_command={sys.executable} train.py --resume"
    words = ("--set", again, "--json", "--detach", "--", sys.executable, "train.py")
    out = desk("submit", "--no-snapshot", "--env", "LINGER=600", *words)
    run = json.loads(out.splitlines()[0])["run"]
    wait_for((desk.folder / "told").exists)
    desk.take_all_nodes()
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    assert json.loads((desk.folder / "told").read_text())[2] == ["--resume"]
    assert [a.cause for a in ledger.attempts(desk.run(run))] == ["preempted", "done"]


FAIL = """
import os, sys, time
if os.environ["RANK"] == "3":
    sys.exit(7)
time.sleep(300)
"""


def test_the_rank_that_fails_first_gives_the_exit_code(desk: Desk) -> None:
    (desk.folder / "train.py").write_text(FAIL)
    size = ("--nodes", "2", "--gpus", "2", "--set", "requeue.crashes=2", "--follow")
    desk("submit", "--no-snapshot", *size, "--", sys.executable, "train.py", code=1)
    assert [(a.cause, a.exit_code) for a in desk.attempts()] == [("crash", 7)] * 2
    told = desk("why")
    left = f"rank 3 on {desk.nodes[1]} ended with exit code 7"
    assert "requeue.crashes" in told and left in told


SAVE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(0))
open("up", "w").close()
time.sleep(300 * (os.environ["HPCDDP_ATTEMPT"] == "1"))
"""


def test_one_that_saves_and_leaves_well_is_not_taken_for_done(desk: Desk) -> None:
    (desk.folder / "train.py").write_text(SAVE)
    words = ("--json", "--detach", "--", sys.executable, "train.py")
    run = json.loads(desk("submit", "--no-snapshot", *words).splitlines()[0])["run"]
    wait_for((desk.folder / "up").exists)
    desk.take_all_nodes()
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    assert [(a.cause, a.exit_code) for a in desk.attempts(run)] == [("preempted", 0), ("done", 0)]


WORLD = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("a world of", dist.get_world_size(), flush=True)
"""
INNER = [
    pytest.param("srun --overlap", "2", "starts processes of its own in each of the 4 ranks"),
    pytest.param("mpirun --allow-run-as-root -np 2", "1",
                 "starts processes of its own in each of the 2 ranks"),
    pytest.param("srun", "2", "runs in each rank, and has started nothing for 60 s",
                 marks=pytest.mark.full),
    pytest.param("mpirun --allow-run-as-root -np 2", "2",
                 "runs in each rank, and has started nothing for 60 s", marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "nodes", "why"), INNER)
def test_a_launcher_inside_the_ranks_ends_the_run_with_the_remedy(
    desk: Desk, launcher: str, nodes: str, why: str
) -> None:
    """srun waits for the CPUs of the ranks unless it may share them; mpirun calls it for others."""
    (desk.folder / "train.py").write_text(WORLD)
    size = ("--nodes", nodes, "--gpus", "2", "--no-snapshot", "--follow")
    shell = f"{launcher} {sys.executable} train.py"
    out = desk("submit", *size, "--", "bash", "-c", shell, code=1)
    name = launcher.split()[0]
    assert f"{name} {why}" in out and f"leave {name} out" in out and "a world of" not in out
    assert [a.cause for a in desk.attempts()] == ["mistake"]
