"""A launcher that starts in each rank makes a world there: the attempt ends with the remedy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import Command, status
from sites import Outcome, Site, record_run

from hpcddp import gloo
from hpcddp.attempt import ledger
from hpcddp.launch import inner_world
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank

BIN = Path(sys.executable).parent
TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("a world of", dist.get_world_size(), flush=True)
dist.barrier()  # one that leaves at once may end another one's connecting
dist.destroy_process_group()
"""
# Each rank is one of torchrun's nodes, and all of them are one world.
NODES = (
    f"{BIN}/torchrun --nnodes $WORLD_SIZE --node-rank $RANK --nproc-per-node 1 "
    "--master-addr $MASTER_ADDR --master-port $MASTER_PORT train.py"
)


def submit(command: Command, shell: str, *more: str, nodes: str = "1", gpus: str = "2") -> Outcome:
    size = ("--nodes", nodes, "--gpus", gpus, "--no-snapshot", *more)
    return command("submit", *size, "--", "bash", "-c", shell)


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        (f"{BIN}/torchrun --nproc-per-node 2", "torchrun"),
        (f"{sys.executable} -m torch.distributed.run", "torch.distributed.run"),
        (f"{BIN}/accelerate launch --multi_gpu --num_processes 2", "accelerate"),
    ],
)
def test_a_launcher_in_each_rank_is_a_user_error(
    site: Site, command: Command, launcher: str, name: str
) -> None:
    site.write("train.py", TRAIN)
    done = submit(command, f"{launcher} train.py --lr '0.1 x'")
    assert done.code == 1 and "a world of" not in done.text, done.text
    (path,) = site.runs.iterdir()
    assert [a.cause for a in ledger.attempts(RunDir(path))] == ["mistake"]
    why = command("why").out
    assert f"{name} starts processes of its own in each of the 2 ranks" in why
    instead = "hpcddp submit --nodes 1 --gpus 2 -- python train.py --lr '0.1 x'"
    assert f"each rank runs the command itself; leave {name} out: {instead}" in done.text


def test_one_in_a_script_of_the_ranks_is_one_too(site: Site, command: Command) -> None:
    site.write("train.py", TRAIN)
    site.write("all.sh", f"{sys.executable} -c 'import torch'\n{BIN}/torchrun train.py\n")
    done = command("submit", "--nodes", "2", "--no-snapshot", "--", "bash", "all.sh")
    assert done.code == 1 and "leave torchrun out" in done.text, done.text
    assert "--nodes 2 --gpus 1 -- python train.py" in done.text


def test_one_under_mpirun_is_one_too(site: Site, command: Command) -> None:
    """mpirun itself is no Python: the ranks that it starts notice it."""
    site.write("train.py", TRAIN)
    mpirun = "PMI_SIZE=4 PMI_RANK=0"  # as MPICH's
    done = submit(command, f"{mpirun} {sys.executable} train.py")
    assert done.code == 1 and "leave mpirun out" in done.text, done.text
    assert status(command)["state"] == "FAILED"


@pytest.mark.parametrize(
    "shell",
    [
        NODES,
        f"[ $RANK = 1 ] || {BIN}/torchrun --nproc-per-node 1 -m this; {sys.executable} train.py",
        f"{BIN}/torchrun --help >/dev/null; {sys.executable} train.py",
        f"{BIN}/accelerate launch --cpu --num_processes 1 train.py",
    ],
    ids=["nodes", "one rank prepares", "help", "accelerate"],
)
def test_one_that_is_right_goes_on(site: Site, command: Command, shell: str) -> None:
    site.write("train.py", TRAIN)
    site.write("run.sh", shell)
    done = submit(command, ". ./run.sh")
    assert done.code == 0 and done.text.count("a world of 2") == 2, done.text


EVALUATES = """
import os, subprocess, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
def child(i): print("child", i, flush=True)
if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = os.path.join(os.environ["HPCDDP_RUN_DIR"], "attempts/1/met")
    while not os.path.exists(folder):
        time.sleep(0.1)
    mp.spawn(child, nprocs=2)
    data = torch.utils.data.DataLoader(range(4), num_workers=1)
    assert len(list(data)) == 4
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MASTER")}
    port = str(29600 + dist.get_rank())
    words = [torchrun, "--master-port", port, "--nproc-per-node", "1", "-m", "this"]
    subprocess.run(words, check=True, env=alone, stdout=subprocess.DEVNULL)
    dist.barrier()
    print("a world of", dist.get_world_size(), flush=True)
    dist.destroy_process_group()
"""


def test_ranks_that_have_met_may_start_others(site: Site, command: Command) -> None:
    site.write("train.py", EVALUATES)
    done = submit(command, f"{sys.executable} train.py")
    assert done.code == 0 and done.text.count("a world of 2") == 2, done.text


@pytest.mark.parametrize("launcher", ["torchrun", "fork"])
def test_our_own_launchers_go_on(site: Site, command: Command, launcher: str) -> None:
    site.write("train.py", TRAIN)
    size = ("--gpus", "2", "--no-snapshot", "--launcher", launcher)
    done = command("submit", *size, "--", sys.executable, "train.py")
    assert done.code == 0 and done.text.count("a world of 2") == 2, done.text


RANK = Rank(1, 4, 1, 2, 0)
OUTER = {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "by"),
    [
        (OUTER, ""),
        ({}, ""),  # a script may remove Slurm's variables
        ({"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "srun"),
        ({"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        (OUTER | {"PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun"),
        (OUTER | {"PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_SIZE": "1"}, ""),
    ],
)
def test_srun_and_mpirun_are_seen_by_their_variables(
    environ: dict[str, str], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gloo, "ask", lambda launcher, command: asked.append(launcher))
    gloo.look_for_world({**environ, gloo.WORLD: gloo.world(RANK, OUTER)})
    assert "".join(asked) == by


@pytest.mark.parametrize(
    ("argv", "whole", "name"),
    [
        (["/x/torchrun", "a.py"], ["python", "/x/torchrun", "a.py"], "torchrun"),
        (["-m", "a.py"], ["python", "-P", "-m", "torch.distributed.run", "a.py"],
         "torch.distributed.run"),
        (["-m", "a.py"], ["python", "-mtorch.distributed.run", "a.py"], "torch.distributed.run"),
        (["-m", "torch.distributed.run"], ["python", "-m", "mine", "torch.distributed.run"], ""),
        (["train.py", "torchrun"], ["python", "train.py", "torchrun"], ""),
        (["-c"], ["python", "-c", "import torch"], ""),
        ([""], ["python"], ""),
        ([], [], ""),
    ],
)  # fmt: skip
def test_a_launcher_is_known_by_its_name(argv: list[str], whole: list[str], name: str) -> None:
    assert gloo.own_launcher(argv, whole) == name


def test_a_rank_alone_does_not_wait_for_long(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Others that start no launcher are not waited for, and nothing is reported."""
    monkeypatch.setattr(inner_world, "LATE", 0.1)
    run = RunDir(site.runs / "program")
    run.attempt(1).path.mkdir(parents=True)
    record_run(run, nodes=(1, 2), gpus=2, spec={"command": ["bash", "x.sh"]})
    words = {"HPCDDP_RUN_DIR": str(run.path), "HPCDDP_ATTEMPT": "1"}
    for name, value in (words | {gloo.WORLD: gloo.world(RANK, {})}).items():
        monkeypatch.setenv(name, value)
    assert inner_world.main(["srun", sys.executable, "-u", "a.py"]) == 0
    assert capfd.readouterr() == ("", "") and not run.attempt(1).error.exists()
    for rank in (0, 2, 3):
        monkeypatch.setenv(gloo.WORLD, f"{rank};4;;;")
        code = inner_world.main(["srun", sys.executable, "-u", "a.py"])
    assert code == gloo.ENDS
    error = json.loads(run.attempt(1).error.read_text())
    assert (error["kind"], error["rank"]) == ("mistake", None)
    assert "--nodes 1-2 --gpus 2 -- python a.py" in capfd.readouterr().err


def test_a_failure_of_the_question_ends_no_rank(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = {"HPCDDP_RUN_DIR": str(site.runs / "gone"), "HPCDDP_ATTEMPT": "1", gloo.WORLD: "0;2;;;"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    gloo.ask("srun", ["python", "a.py"])  # else this process has ended
    assert capfd.readouterr() == ("", "")


def test_it_costs_a_program_nothing(tmp_path: Path) -> None:
    """No import of torch's agent, and no process."""
    code = "import sys, torch; print('torch.distributed.launcher.api' in sys.modules)"
    words = {"HPCDDP_RUN_DIR": str(tmp_path), gloo.WORLD: "0;2;;;"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **words},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"
