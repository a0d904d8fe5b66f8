"""What a user can get wrong, and names that would like to run something."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sites import Outcome, Site

Command = Callable[..., Outcome]

SLURM = ("--cluster", "slurm")
# What is wrong -> arguments, words that must be in the message: where it is, and what to do.
BAD = {
    "no nodes": (["--nodes", "0"], ["--nodes", "whole number"]),
    "negative nodes": (["--nodes", "-1"], ["--nodes", "whole number"]),
    "nodes in words": (["--nodes", "two"], ["--nodes", "'two'", "1-4"]),
    "no gpus": (["--gpus", "0"], ["--gpus", "at least 1"]),
    "negative gpus": (["--gpus", "-1"], ["--gpus", "at least 1"]),
    "gpus in words": (["--gpus", "two"], ["--gpus", "a whole number"]),
    "unknown job": (["tou"], ["'tou'", "did you mean toy?"]),
    "job file that is not there": (["jobs/x.toml"], ["jobs/x.toml", "no such file"]),
    "job file that is not TOML": (
        ["broken"],
        ["jobs/broken.toml", "not TOML", "line 2", "each line must be KEY"],
    ),
    "unknown key in a file": (["typo"], ["jobs/typo.toml", "'epoch'", "did you mean epochs?"]),
    "unknown key": (["--set", "lr=1"], ["--set", "'lr'", "did you mean train.lr?"]),
    "key in other words": (["--set", "train.learning_rate=1"], ["did you mean train.lr?"]),
    "value of a wrong kind": (["--set", "epochs=few"], ["--set", "epochs", "a whole number"]),
    "no value": (["--set", "epochs"], ["--set", "expected KEY=VALUE, got 'epochs'"]),
    "unknown cluster": (["--cluster", "slrum"], ["'slrum'", "did you mean slurm?"]),
    "unknown template": (["--template", "slrum.sh.j2"], ["--template", "mean slurm.sh.j2?"]),
    "undefined name": (["--template", "undefined.sh.j2"], ["undefined.sh.j2:3", "'lanucher'"]),
    "raw value": (["--template", "raw.sh.j2"], ["raw.sh.j2:3", "variables()"]),
    "time in words": ([*SLURM, "--time", "abc"], ["--time", "'abc'", "d-h:m:s"]),
    "time of four parts": ([*SLURM, "--time", "1:2:3:4"], ["--time", "d-h:m:s"]),
    "negative time": ([*SLURM, "--time", "-5"], ["--time", "d-h:m:s"]),
    "newline in an option": (["-p", "a\nb"], ["--partition", "slurm.partition", "one plain line"]),
    "newline in a variable": (["--env", "A=a\nb"], ["--env", "env.A", "one plain line"]),
    "newline in a name": (["-J", "a\nb"], ["--name", "use a letter or digit"]),
    "newline in the folder": (["--runs", "a\nb"], ["a\\nb", "one line of plain text"]),
    "escape in a path": (["--cluster", "\x1b[31m/x"], ["\\x1b[31m/x", "no such file"]),
    "name that runs": (["-J", "$(touch x)"], ["--name", "use a letter or digit"]),
    "name with a slash": (["-J", "a/b"], ["--name", "use a letter or digit"]),
    "tasks": (
        [*SLURM, "--sbatch", "ntasks=3"],
        ["--sbatch", "conflicts with", "--nodes and --gpus"],
    ),
    "gpus per task": ([*SLURM, "--sbatch", "gpus-per-task=1"], ["conflicts with", "--gpus"]),
    "no option": ([*SLURM, "--sbatch", "a b=1"], ["--sbatch", "'a b'", "long name"]),
    "variable of the ranks": (["--env", "RANK=1"], ["--env", "RANK", "launcher"]),
    "batch that does not divide": (["--gpus", "5"], ["global_batch 96", "such as 95 or 100"]),
    "folder in the way of a file": (["--runs", "file/runs"], ["file", "--runs", "HPCDDP_RUNS"]),
    "unknown strategy": (["--strategy", "fspd"], ["--strategy", "'fspd'", "did you mean fsdp?"]),
    "sizes that do not multiply": (
        ["--gpus", "4", "--strategy", "pp=3,ddp"],
        ["--strategy", "pp=3 = 3", "1 x 4 = 4 ranks"],
    ),
    "strategy of a command": (
        ["--strategy", "fsdp", "--no-snapshot", "--", "bash", "-c", "true"],
        ["--strategy", "'fsdp'", "a command distributes its model", "remove the strategy"],
    ),
    "option without its strategy": (
        ["--gpus", "4", "--strategy", "fsdp", "--set", "ddp.hook=bf16"],
        ["--set", "ddp.hook is bf16", "without DDP", "remove ddp.hook, or use ddp"],
    ),
    "too many nodes": (["--cluster", "small", "--nodes", "4"], ["small.toml", "4 nodes", "has 3"]),
}


@pytest.fixture
def mistakes(site: Site) -> Site:
    site.job("broken", "epochs = 1\nepochs = = 2\n")
    site.job("typo", "epoch = 1\n")
    site.write("raw.sh.j2", "#!/bin/bash\n\n{{ launcher }}\n")
    site.write("undefined.sh.j2", "#!/bin/bash\n\n{{ lanucher }}\n")
    site.write("file", "")
    site.profile("small", "nodes = 3\n")
    return site


def with_job(arguments: list[str]) -> list[str]:
    """The job is named, unless the arguments begin with one."""
    return arguments if not arguments[0].startswith("-") else ["toy", *arguments]


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_an_error_with_place_and_remedy(
    mistakes: Site, hpcddp: Command, what: str
) -> None:
    arguments, words = BAD[what]
    for command in ("render", "submit"):
        done = hpcddp(command, *with_job(arguments))
        assert (done.code, done.out) == (2, "")
        assert [w for w in words if w not in done.err] == []
        assert "\x1b" not in done.err
    assert not mistakes.runs.exists()
    assert not (mistakes.folder / "x").exists()


@pytest.mark.parametrize(
    "what", ["nodes in words", "raw value", "unknown job", "newline in a name"]
)
def test_so_it_is_for_the_process(mistakes: Site, command: Command, what: str) -> None:
    arguments, words = BAD[what]
    done = command("submit", *with_job(arguments))
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err and all(w in done.err for w in words)
    assert not mistakes.runs.exists()


NAMES = ["a b", "it's", 'say "hi"', "$(touch x)", "`touch x`;", "50%d", "größe 数", "&& touch x #"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_files_may_be_anything_and_run_nothing(
    site: Site, hpcddp: Command, name: str
) -> None:
    path = site.job(name, f"name = 'n'\ntask = {json.dumps(name + '.py')}\n")
    site.write(name + ".sh.j2", "{% extends 'slurm.sh.j2' %}")
    site.write(name + "/site.toml", "backend = 'slurm'")
    done = hpcddp(
        "render", f"jobs/{name}.toml", "--runs", name + "/runs", "--template", name + ".sh.j2",
        "--cluster", name + "/site.toml", "-p", name, "--env", f"A={name}",
        "--sbatch", f"comment={name}",
    )  # fmt: skip
    assert done.code == 0, done.err
    (run,) = (site.folder / name / "runs").iterdir()
    job = json.loads((run / "job.json").read_text())
    assert Path(job["spec"]["task"]) == path.with_suffix(".py")
    assert (job["spec"]["env"]["A"], job["spec"]["slurm"]["partition"]) == (name, name)
    # bash runs what it is given up to the claim, which finds no job of Slurm to work in.
    site.program("srun", "exit 0")
    ran = subprocess.run(["bash", run / "job.sbatch"], capture_output=True, check=False)
    assert ran.returncode in (0, 1)
    assert not list(site.folder.rglob("x"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "gpu", "toy"], ["--partition: requires Slurm", "--cluster local"]),
        (["--sbatch", "mem=1G", "toy"], ["--sbatch: mem requires Slurm", "--cluster local"]),
        (
            ["--gpus", "2", "--no-snapshot", "--", "torchrun", "--max_restarts", "3", "t.py"],
            ["hpcddp submit --gpus 2 --no-snapshot -- python t.py", "--max_restarts 3"],
        ),
        (
            ["--no-snapshot", "--runs", "my runs", "--", "srun", "-n", "2", "./a.sh", "b"],
            ["hpcddp submit --no-snapshot --runs 'my runs' --gpus 2 -- ./a.sh b"],
        ),
        (["--no-snapshot", "--", "./a.sh", "b"], ["chmod +x ./a.sh", "bash ./a.sh b"]),
    ],
)
def test_what_would_do_something_else_is_refused_before_a_run_is_left(
    site: Site, hpcddp: Command, arguments: list[str], words: list[str]
) -> None:
    site.write("a.sh", "")
    done = hpcddp("submit", *arguments)
    assert (done.code, done.out) == (2, "")
    assert [word for word in words if word not in done.err] == []
    assert not list(site.folder.glob("*runs"))


def test_memory_without_a_unit_is_refused(site: Site, hpcddp: Command) -> None:
    done = hpcddp("plan", "toy", "--memory", "80")
    assert (done.code, done.out) == (2, "")
    assert "--memory: memory size '80' has no unit" in done.err and "80G" in done.err


@pytest.mark.parametrize("command", ["config", "plan"])
def test_what_starts_nothing_does_not_say_that_anything_runs(
    site: Site, hpcddp: Command, command: str
) -> None:
    done = hpcddp(command, "toy", "--gpus", "2")
    assert done.code == (0 if command == "config" else 2)  # this fixture refuses to import a task
    assert "running" not in done.err
