"""Runs on this machine whose ranks have an environment of their own."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import images
import pytest
from local_runs import Command, status, until
from local_runs import toy as toy
from pythons import torch_alone
from sites import Site

# What a rank of a command is given.
TELL = """
import json, os, sys
import hpcddp
names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "GREETING", "PYTHONPATH", "LD_PRELOAD")
told = {name: os.environ.get(name) for name in names}
told |= {"python": sys.prefix, "hpcddp": hpcddp.__file__, "folder": os.getcwd()}
print("told", json.dumps(told), flush=True)
"""


def told(command: Command) -> dict[str, Any]:
    """What the rank 0 of a run said."""
    line = next(x for x in command("logs").out.splitlines() if "told {" in x)
    found: dict[str, Any] = json.loads(line.partition("told ")[2])
    return found


@pytest.mark.parametrize(
    ("software", "step"),
    [
        ("setup = ['export A=1', 'exit 7', 'export B=2']", "software.setup: exit 7: exit code 7"),
        (
            "setup = ['test -n \"$UNSET_HERE\"']",
            'software.setup: test -n "$UNSET_HERE": exit code 1',
        ),
        ("venv = '/nowhere'", "software.venv: activate /nowhere: exit code 1"),
        (
            "container = {image = '/nowhere.sif'}",
            "software.container.image: /nowhere.sif is missing",
        ),
    ],
)
def test_a_step_that_fails_ends_the_attempt_and_is_named(
    toy: Site, command: Command, software: str, step: str
) -> None:
    toy.write("jobs/toy.toml", f"global_batch = 8\nmax_steps = 1\n[software]\n{software}\n")
    assert command("submit", "--gpus", "1", "--follow").code == 1
    why = json.loads(command("why", "--json").out)
    (attempt,) = why["attempts"]
    assert (attempt["cause"], attempt["action"]) == ("environment", "none")
    said = command("why").out
    assert step in said and "Traceback" not in said


def test_modules_and_setup_reach_the_ranks(toy: Site, command: Command) -> None:
    """The site's profile has a shell function, as sites have."""
    toy.write("site.sh", 'module() { echo "module $*"; export "LOADED=${LOADED-}+$2"; }\n')
    software = {"setup": ["GREETING=$LOADED; export GREETING"], "modules": ["cuda", "nccl"]}
    toy.write("tell.py", TELL)
    toy.write("child.sh.j2", '{% extends "local.sh.j2" %}\n{% block setup %}\n'
              f". {toy.folder}/site.sh\n{{{{ super() }}}}\n{{% endblock %}}\n")  # fmt: skip
    sets = [x for name, value in software.items()
            for x in ("--set", f"software.{name}={json.dumps(value)}")]  # fmt: skip
    words = ("--template", "child.sh.j2", *sets, "--no-snapshot", "--follow", "--")
    assert command("submit", "--gpus", "1", *words, sys.executable, "tell.py").code == 0
    assert told(command)["GREETING"] == "+cuda+nccl"
    assert "module purge" not in command("render", "--gpus", "1").out


@pytest.mark.full
def test_a_task_trains_in_a_python_with_torch_alone_and_comes_back(
    toy: Site, command: Command, tmp_path: Path
) -> None:
    venv = torch_alone(tmp_path / "venv")
    toy.write("jobs/toy.toml", "global_batch = 8\nmax_steps = 60\ndataset.pause = 0.05\n"
              f"software.venv = '{venv}'\n")  # fmt: skip
    assert command("submit", "--gpus", "2", "--detach").code == 0
    until(command, lambda s: s["state"] == "RUNNING" and s["step"] > 0)
    assert command("preempt", "last").code == 0
    ended = until(command, lambda s: s["state"] in ("COMPLETED", "FAILED"))
    assert (ended["state"], ended["step"], ended["attempt"]) == ("COMPLETED", 60, 2)
    packages = json.loads(Path(ended["path"], "versions.json").read_text())["packages"]
    assert "torch" in packages and "numpy" not in packages
    assert json.loads(command("why", "--json").out)["steps_lost"] == 0


@pytest.mark.full
def test_a_command_imports_hpcddp_from_the_run_folder(
    toy: Site, command: Command, tmp_path: Path
) -> None:
    venv = torch_alone(tmp_path / "venv")
    toy.write("tell.py", TELL)
    words = ("--set", f"software.venv={venv}", "--follow", "--", "python", "tell.py")
    assert command("submit", "--gpus", "1", *words).code == 0
    found, run = told(command), status(command)["path"]
    assert found["python"] == str(venv)
    assert found["hpcddp"].startswith(f"{run}/package.pyz/")


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("ch-run"), reason="needs ch-run, which scripts/test installs")
def test_ranks_in_charliecloud_are_preempted_and_lose_nothing(
    toy: Site, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/host")
    monkeypatch.setenv("USER", os.environ.get("USER", "root"))
    image = ("--set", f"software.container.image={images.made()}")
    image += ("--set", "software.container.runtime=charliecloud")
    toy.write("tell.py", TELL)
    words = ("--env", "GREETING=it's", "--follow", "--", "python3", "tell.py")
    assert command("submit", "--gpus", "1", *image, *words).code == 0
    found, run = told(command), status(command)["path"]
    assert (found["GREETING"], found["WORLD_SIZE"]) == ("it's", "1")
    assert found["PYTHONPATH"] == f"{run}/package.pyz"
    sets = ("--set", "max_steps=60", "--set", "dataset.pause=0.05")
    assert command("submit", "--nodes", "2", "--gpus", "2", *image, *sets, "--detach").code == 0
    until(command, lambda s: s["state"] == "RUNNING" and s["step"] > 0)
    assert command("preempt", "last").code == 0
    ended = until(command, lambda s: s["state"] in ("COMPLETED", "FAILED"))
    assert (ended["state"], ended["step"], ended["attempt"]) == ("COMPLETED", 60, 2)
    assert json.loads(command("why", "--json").out)["steps_lost"] == 0
