"""The whole scripts: what a change does to them is seen in the diff of tests/golden."""

import itertools
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sites import CHECKOUT, Site

from hpcddp import __version__
from hpcddp.launch import launchers
from hpcddp.launch.launchers import LAUNCHERS, Launcher
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir

GOLDEN = CHECKOUT / "tests" / "golden"
WORK = "/home/ann/work"
RUN = RunDir(f"{WORK}/runs/toy-20300101-0000-abcd")
PROFILE = """
gpu_option = "gres"
gpu_type = "a100"
cpus_per_gpu = 8
host_suffix = "-ib0"
interface = "ib0"
modules = ["cuda/12.4", "nccl"]
[variables]
SCRATCH_ROOT = "/scratch"
[slurm]
partition = "gpu"
constraint = "a100&nvlink"
"""
# Jobs with each kind of software, all under the usual launcher; a name -> its [software].
SOFTWARE = {
    "modules": {"purge": True, "modules": ["cuda/12.4", "nccl"], "setup": ["source /opt/x/env.sh"]},
    "conda": {"conda": "train"},
    "venv": {"venv": "/home/ann/venv"},
    "uv": {"uv": "/home/ann/project"},
    "apptainer": {"container": {"image": "/images/torch.sif", "binds": ["/scratch"]}},
    "charliecloud": {"container": {"image": "/images/torch", "runtime": "charliecloud"}},
    "pyxis": {"container": {"image": "nvcr.io#nvidia/pytorch:25.01-py3", "runtime": "pyxis"}},
    "enroot": {"container": {"image": "/images/torch.sqsh", "runtime": "enroot"}},
    "podman-hpc": {"container": {"image": "torch:2.9", "runtime": "podman-hpc"}},
    "shifter": {"container": {"image": "docker:torch:2.9", "runtime": "shifter"}},
}
# Profiles of a site that adds to each block: every job is an array there, and tells a tracker.
FULL = """
backend = "{backend}"
template = "theirs.sh.j2"
cpus_per_gpu = 8
modules = ["cuda/12.4"]
"""
TEMPLATE = """{% extends "BASE" %}
{% block directives %}
{{ super() }}
{{ sbatch("array", "0-3") }}
{% endblock %}
{% block setup %}
{{ super() }}
ulimit -n 65536
{% endblock %}
{% block launch %}
echo "ranks start on $NODES nodes"
{{ super() }}
{% endblock %}
{% block finish %}
echo "ranks left with $code"
{% endblock %}
{% block requeue %}
{{ super() }}
{% endblock %}
"""
# The blocks that TEMPLATE adds.
OF_THE_SITE = ("#SBATCH --array", "ulimit", "echo")


def bare(site: Site, name: str) -> Plan:
    """A job of a task as it is (plain, local), or with what a profile and flags can say (site)."""
    flags = Layer()
    flags.put("nodes", "2", "--nodes")
    flags.put("gpus", 4, "--gpus")
    if name == "site":
        site.profile("site", PROFILE)
        flags.put("slurm.comment", 'of "ours"', "--sbatch")
        flags.put("env.GREETING", "it's $HOME", "--env")
    flags.put("cluster", {"plain": "slurm"}.get(name, name), "--cluster")
    plan = site.plan(flags)
    return plan if name == "site" else replace(plan, cpus_per_task=1)


def full(site: Site, launcher: str, backend: str, program: bool) -> Plan:
    """A job of a launcher at a site with modules, a template of its own, an array and trackers."""
    profile = site.profile("theirs", FULL.format(backend=backend))
    text = TEMPLATE.replace("BASE", f"{backend}.sh.j2")
    profile.with_name("theirs.sh.j2").write_text(text)
    flags = Layer()
    flags.put("nodes", "2", "--nodes")
    flags.put("gpus", 4, "--gpus")
    flags.put("cluster", "theirs", "--cluster")
    flags.put("launcher", launcher, "--launcher")
    flags.put("metrics.trackers", ["tensorboard", "wandb"], "--set")
    if program:
        flags.put("command", [sys.executable, "train.py", "--lr", "0.1 x"], "--")
    plan = site.plan(flags, None if program else "toy")
    return replace(plan, cpus_per_task=8)  # whatever this machine has


def with_keys(site: Site, values: dict[str, Any], launcher: str) -> Plan:
    """A job with these keys."""
    flags = Layer()
    flags.put("nodes", "2", "--nodes")
    flags.put("gpus", 4, "--gpus")
    flags.put("cluster", "local" if launcher == "spawn" else "slurm", "--cluster")
    flags.put("launcher", launcher, "--launcher")
    flags.put_all(values, "--set")
    return replace(site.plan(flags), cpus_per_task=8)


def text_of(plan: Plan) -> str:
    here = str(plan.workdir)
    origin = plan.origin._replace(line=("submit", "toy", "--nodes", "2", "--gpus", "4"))
    plan = replace(plan, workdir=Path(WORK), origin=origin)
    text = plan.render(RUN, plan.worker_command(RUN)).replace(sys.executable, "/venv/bin/python")
    return text.replace(here, WORK).replace(f"hpcddp {__version__}", "hpcddp VERSION")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that any launcher needs is there."""
    for name, row in LAUNCHERS.items():
        monkeypatch.setitem(LAUNCHERS, name, row._replace(missing=launchers.nothing))


def rows() -> list[tuple[Launcher, str, bool]]:
    """Each launcher, each script that it can stand in, a task and a program."""
    every = ((row, backend) for row in LAUNCHERS.values() for backend in row.backends)
    return [(*pair, program) for pair, program in itertools.product(every, (False, True))]


def test_the_scripts_are_as_they_were(site: Site, installed: None) -> None:
    texts = {name: text_of(bare(site, name)) for name in ("plain", "site", "local")}
    for launcher, backend, program in rows():
        name = f"{launcher.name}-{backend}-{'program' if program else 'task'}"
        texts[name] = text_of(full(site, launcher.name, backend, program))
    for name, values in SOFTWARE.items():
        text = text_of(with_keys(site, {"software": values}, "srun"))
        texts[f"software-{name}"] = text.replace(str(site.folder), "/home/ann/code")
    texts["queued"] = text_of(with_keys(site, {"requeue": {"here": False}}, "srun"))
    texts["spares"] = text_of(with_keys(site, {"spares": 1}, "fork"))
    new = site.folder / "golden"
    new.mkdir()
    for name, text in texts.items():
        (new / f"{name}.sbatch").write_text(text)
    changed = [
        name
        for name in texts
        if not (golden := GOLDEN / f"{name}.sbatch").exists() or golden.read_text() != texts[name]
    ]
    kept = {path.stem for path in GOLDEN.glob("*.sbatch")}
    assert not changed, f"{changed}: if this is meant: cp {new}/*.sbatch {GOLDEN}"
    assert kept == set(texts)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sbatch")), ids=lambda p: p.stem)
def test_each_block_begins_with_a_comment(path: Path) -> None:
    blocks = re.split(r"\n\n+", path.read_text().removeprefix("#!/bin/bash\n").strip())
    ours = [block for block in blocks if not block.startswith(OF_THE_SITE)]
    assert len(ours) > 8
    assert [block for block in ours if not re.match(r"# \w", block)] == []


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sbatch")), ids=lambda p: p.stem)
def test_bash_reads_the_scripts(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        # Some variables are for the other backend or a site's template; values are not expanded;
        # a trap calls a function.
        subprocess.run(
            ["shellcheck", "--exclude=SC1091,SC2034,SC2016,SC2054,SC2317", path], check=True
        )
