"""Modules, lines of shell and a Python of their own for ranks on the real Slurm."""

import json
from pathlib import Path

from pythons import torch_alone

from .desk import Desk

TELL = """
import json, os, sys
import hpcddp
names = ("RANK", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES", "LOADED", "GREETING")
told = {name: os.environ.get(name) for name in names}
told |= {"python": sys.prefix, "hpcddp": hpcddp.__file__}
json.dump(told, open(f"told-{os.environ['RANK']}.json", "w"))
"""
# A cluster whose modules are a function of a shell file, as the system's /etc/profile has it.
TEMPLATE = """{% extends "slurm.sh.j2" %}
{% block setup %}
. "$MODULES_FILE"
{{ super() }}
{% endblock %}
"""
MODULE = """module() {
  [ "$2" != nosuch ] || { echo "unknown module $2" >&2; return 1; }
  export "LOADED=${LOADED-}+$1${2:+ $2}"
}
"""
PROFILE = """
template = "site.sh.j2"
variables.MODULES_FILE = "HERE"
[software]
modules = ["cuda", "nccl"]
setup = ["export GREETING=$LOADED"]
"""


def site(desk: Desk) -> str:
    """The profile of a cluster with modules; its path."""
    (desk.folder / "modules.sh").write_text(MODULE)
    (desk.folder / "site.sh.j2").write_text(TEMPLATE)
    profile = desk.folder / "site.toml"
    profile.write_text(PROFILE.replace("HERE", str(desk.folder / "modules.sh")))
    return str(profile)


def test_ranks_have_modules_setup_and_a_python_with_torch_alone(desk: Desk, tmp_path: Path) -> None:
    venv = torch_alone(tmp_path / "venv")
    (desk.folder / "tell.py").write_text(TELL)
    how = ("--cluster", site(desk), "--set", f"software.venv={venv}", "--no-snapshot", "--follow")
    desk("submit", "--nodes", "2", "--gpus", "1", *how, "--", "python", "tell.py")
    for rank in range(2):
        told = json.loads((desk.folder / f"told-{rank}.json").read_text())
        assert (told["RANK"], told["SLURM_PROCID"]) == (str(rank), str(rank))
        assert told["LOADED"] == told["GREETING"] == "+load cuda+load nccl"
        assert told["python"] == str(venv)
        assert told["hpcddp"].startswith(f"{desk.run().path}/package.pyz/")
        assert told["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_preempted_task_comes_back_in_its_environment(desk: Desk, tmp_path: Path) -> None:
    venv = torch_alone(tmp_path / "venv")
    how = ("--cluster", site(desk), "--set", f"software.venv={venv}", "-p", "low")
    long = ("--set", "max_steps=200", "--set", "dataset.pause=0.05")
    desk.submit("--nodes", "2", "--gpus", "1", *how, *long)
    desk.training()
    desk.take_all_nodes()
    desk.until(lambda s: s["state"] == "COMPLETED")
    first, second = desk.attempts()
    assert (first.cause, second.cause) == ("preempted", "done")
    assert json.loads(desk("why", "--json"))["steps_lost"] == 0


def test_a_module_that_is_not_there_is_named(desk: Desk) -> None:
    words = ("--cluster", site(desk), "--set", 'software.modules=["cuda", "nosuch"]')
    desk("submit", "toy", "--gpus", "1", *words, "--follow", code=1)
    (attempt,) = desk.attempts()
    assert (attempt.cause, attempt.action) == ("environment", "none")
    assert "software.modules: module load nosuch: exit code 1" in desk("why")


def test_a_resume_on_another_cluster_takes_its_software(desk: Desk) -> None:
    first = site(desk)
    words = ("--cluster", first, "--set", 'software.setup=["exit 3"]')
    desk("submit", "toy", "--gpus", "1", *words, "--follow", code=1)
    other = desk.folder / "other.toml"
    other.write_text('[software]\nsetup = ["true"]\n')
    desk("resume", "last", "--cluster", str(other), "--set", 'software.setup=["true"]', "--follow")
    script = desk.run().script.read_text()
    assert "module load" not in script and "readonly -a SETUP=(true)" in script
    assert [attempt.cause for attempt in desk.attempts()] == ["environment", "done"]
