"""A cluster that hpcddp has never seen: detected, then used by a script that nobody adapted."""

import dataclasses
import json
import sys
import time
import tomllib
from pathlib import Path

import pages
import pytest
from sites import CHECKOUT

from .desk import Desk, Slurm

RELATIVE = """
import os, pathlib
if os.environ["RANK"] == "0":
    pathlib.Path("results").mkdir(exist_ok=True)
    pathlib.Path("results/weights.txt").write_text("done")
"""

FIRST = 60.0  # seconds from the first command to the first step, on an idle cluster

OUTSIDE = """
folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "{name}")
print("read", open(os.path.join(folder, "x.txt")).read(), flush=True)
"""


@pytest.fixture
def newcomer(desk: Desk) -> Desk:
    """A user without any profile, in a folder with one script."""
    for path in (desk.folder / "jobs").iterdir():
        path.unlink()
    programs = f"{Path(sys.executable).parent}:{desk.slurm.environ['PATH']}"  # an active venv
    config = {"XDG_CONFIG_HOME": str(desk.folder / "config"), "PATH": programs}
    slurm = Slurm(desk.slurm.sandbox, desk.slurm.environ | config)
    script = next(iter(pages.blocks(CHECKOUT / "docs" / "howto" / "own-script.md")))
    step = "        optimizer.step()\n"
    text = script.text.replace(step, f"{step}        print('a step', flush=True)\n")
    (desk.folder / "train.py").write_text(text + RELATIVE)
    return dataclasses.replace(desk, slurm=slurm)


@pytest.mark.full
@pytest.mark.smoke("newcomer with data elsewhere")
def test_two_commands_train_a_script_with_data_outside_of_its_project(newcomer: Desk) -> None:
    """As it is: init chooses the nodes and all their GPUs."""
    data = newcomer.folder.with_name(f"{newcomer.folder.name}-data")
    data.mkdir()
    (data / "x.txt").write_text("7")
    with (newcomer.folder / "train.py").open("a") as script:
        script.write(OUTSIDE.format(name=data.name))
    begin = time.time()
    newcomer("init", "--yes")
    newcomer("submit", "train")
    newcomer.until(lambda s: "a step" in newcomer("logs", "last"))
    took = time.time() - begin
    print(f"the first step came {took:.0f} s after the first command")
    assert took <= FIRST
    done = newcomer.until(lambda s: s["state"] == "COMPLETED")
    assert done["gpus_per_node"] == 4
    assert newcomer("logs", "last").count("read 7") == int(done["nodes"]) * 4


@pytest.mark.smoke("newcomer")
def test_two_commands_train_a_script_on_a_cluster_never_seen(newcomer: Desk) -> None:
    told = newcomer("init", "--yes")
    assert "script    train.py (DDP)" in told and "accepted" in told
    profile = tomllib.loads((newcomer.folder / "config/hpcddp/clusters/sandbox.toml").read_text())
    assert profile["gpu_option"] == "gpus-per-node"
    assert "slurm" not in profile or "partition" not in profile["slurm"]  # the default one serves
    newcomer("submit", "train", "--gpus", "2", "--set", "nodes=2")
    done = newcomer.until(lambda s: s["state"] == "COMPLETED")
    assert (done["nodes"], done["gpus_per_node"]) == ("2", 2)
    assert (Path(done["path"]) / "work/results/weights.txt").read_text() == "done"


@pytest.mark.smoke("detection")
def test_what_slurm_says_is_what_the_sandbox_is(newcomer: Desk) -> None:
    facts = json.loads(newcomer("cluster", "detect", "--json"))
    assert facts["cluster"] == "sandbox" and facts["version"]
    assert {row["name"] for row in facts["partitions"]} == {"low", "high"}
    low = next(kind for kind in facts["kinds"] if kind["partition"] == "low")
    assert low["nodes"] == len(newcomer.nodes) and low["default"]
    assert [row["count"] for row in low["gpus"]] == [4]
    (sample,) = facts["samples"].values()
    assert sample["arch"] and sample["cpus"] == low["cpus"]
    assert facts["unread"] == {
        "accounts": "this Slurm has no accounting",
        "QOS": "this Slurm has no accounting",
    }
    assert newcomer("cluster", "check", "sandbox").splitlines()[-1].startswith("sbatch    accepted")


def test_ranks_on_cpus_run_without_a_gpu_directive(newcomer: Desk) -> None:
    newcomer("submit", "--nodes", "2", "--procs", "2", "--", "python", "train.py")
    done = newcomer.until(lambda s: s["state"] == "COMPLETED")
    script = (Path(done["path"]) / "job.sbatch").read_text()
    assert "--gpus" not in script and "export CUDA_VISIBLE_DEVICES" not in script
    assert "CUDA_VISIBLE_DEVICES=" in script
