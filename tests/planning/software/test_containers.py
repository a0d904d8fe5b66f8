"""The command of each runtime, beside what its documentation shows."""

import itertools
import re
import shlex
import subprocess
from pathlib import Path

import jinja2
import pytest
from sites import Site, flags

from hpcddp.planning import resources
from hpcddp.planning.software import containers, software_facts
from hpcddp.planning.software.containers import CONTAINERS
from hpcddp.rundir import RunDir
from hpcddp.spec import KEYS, ContainerSpec

BINDS = ["/work:/work", "/data:/in:ro"]
# Runtime -> words before the command of a rank, and the options of srun. Each option stands as in
# the page that containers.py names.
SHOWN = {
    "apptainer": (
        "apptainer exec --nv --bind=/work:/work --bind=/data:/in:ro --pwd=/work IMAGE",
        "",
    ),
    "singularity": (
        "singularity exec --nv --bind=/work:/work --bind=/data:/in:ro --pwd=/work IMAGE",
        "",
    ),
    "charliecloud": ("ch-run --bind=/work:/work --bind=/data:/in --cd=/work IMAGE --", ""),
    "pyxis": (
        "",
        "--container-mounts=/work:/work,/data:/in:ro --container-workdir=/work "
        "--container-image=IMAGE",
    ),
    "enroot": (
        "enroot start --mount=/work:/work:none:x-create=dir,bind "
        "--mount=/data:/in:none:x-create=dir,bind,ro IMAGE",
        "",
    ),
    "podman-hpc": (
        "podman-hpc run --rm --network=host --ipc=host --pid=host --gpu --volume=/work:/work "
        "--volume=/data:/in:ro --workdir=/work IMAGE",
        "",
    ),
    "shifter": (
        "shifter --module=gpu --volume=/work:/work --volume=/data:/in:ro --image=IMAGE",
        "",
    ),
}


def words(runtime: str, gpus: bool = True) -> list[str]:
    container = ContainerSpec(image="IMAGE", runtime=runtime)
    return containers.command(container, BINDS, "/work", gpus=gpus)


@pytest.mark.parametrize("runtime", SHOWN)
def test_a_command_is_as_the_documentation_shows(runtime: str) -> None:
    before, of_srun = SHOWN[runtime]
    command = words(runtime)
    if CONTAINERS[runtime].passes:
        assert command[:2] == ["bash", "-c"] and command[3] == "--env"
        command = command[4:]
    if "sh" in command:
        assert command[-4:] == ["sh", "-c", containers.ENTER, "/work"]
        command = command[:-4]
    assert shlex.join(command) == before
    container = ContainerSpec(image="IMAGE", runtime=runtime)
    if of_srun:
        options = containers.options(container, BINDS, "/work", gpus=True)
        assert shlex.join(options) == of_srun


def test_each_runtime_that_a_job_can_name_has_a_row() -> None:
    assert set(KEYS.rows["software.container.runtime"].choices) == set(CONTAINERS) == set(SHOWN)


def test_amd_gpus_and_none() -> None:
    container = ContainerSpec(image="i", gpus="rocm")
    assert "--rocm" in containers.command(container, [], "/work", gpus=True)
    assert "--nv" not in words("apptainer", gpus=False)


@pytest.mark.parametrize(
    ("profile", "values", "visible"),
    [
        ("slurm.constraint = 'a100'", [], True),
        ("", [("slurm.constraint", "v100&ib")], True),
        ("", [("slurm.gres", "gpu:4")], True),
        ("", [("slurm.tres-per-task", "gres/gpu=1")], True),
        ("", [("slurm.constraint", "ib"), ("slurm.gres", "lustre:1")], False),
        ("slurm.constraint = 'a100'", [("device", "cpu")], False),
    ],
)
def test_gpus_that_a_feature_or_the_user_asks_for_are_visible_in_the_container(
    site: Site, profile: str, values: list[tuple[str, str]], visible: bool
) -> None:
    site.profile("mine", f"gpu_option = 'none'\n{profile}")
    image = ("software.container.image", "/torch.sif")
    plan = site.plan(flags(("cluster", "mine"), image, *values))
    run = RunDir(site.runs / "toy-1")
    script = plan.render(run, plan.worker_command(run))
    assert ("CONTAINER=(apptainer exec --nv " in script) is visible
    assert ("CONTAINER=(apptainer exec --bind=" in script) is not visible


@pytest.mark.parametrize("runtime", ["enroot", "podman-hpc"])
def test_a_rank_has_its_variables_where_a_container_begins_with_none(
    runtime: str, tmp_path: Path
) -> None:
    """The program is one that says what it was given."""
    program = tmp_path / CONTAINERS[runtime].start[0]
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RANK": "3", "CUDA_VISIBLE_DEVICES": "1"}
    environ |= {"LD_PRELOAD": "", "PYTHONPATH": "/host", "TEXT": "two\nlines"}
    said = subprocess.run(
        [*words(runtime), "python"], env=environ, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    passed = {name for option, name in itertools.pairwise(said) if option == "--env"}
    assert passed == {"RANK", "CUDA_VISIBLE_DEVICES", "TEXT"}
    assert said[0] == CONTAINERS[runtime].start[1] and said[-1] in ("python", "/work")


def test_a_container_without_an_option_for_it_starts_in_the_working_folder(tmp_path: Path) -> None:
    words = ["sh", "-c", containers.ENTER, str(tmp_path), "pwd"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == str(
        tmp_path
    )


@pytest.mark.parametrize(
    ("environ", "bound"),
    [
        ({"TMPDIR": "/usr"}, "--bind=/usr "),
        ({"SLURM_TMPDIR": "/opt", "TMPDIR": "/usr"}, "--bind=/opt "),
        ({"SLURM_TMPDIR": "/nowhere", "TMPDIR": "/usr"}, "--bind=/usr "),  # of another node
        ({"TMPDIR": "/tmp"}, ""),  # each runtime has it
        ({"TMPDIR": "usr"}, ""),
        ({}, ""),
    ],
)
def test_each_node_binds_its_folder_for_temporary_files(
    environ: dict[str, str], bound: str
) -> None:
    script = Path(__file__).parents[2].joinpath("golden/software-apptainer.sbatch").read_text()
    (text,) = re.findall(r"^bind_tmp='(.*?)'$", script, re.DOTALL | re.MULTILINE)
    words = ["/bin/bash", "-c", text, "bash", "echo", "exec", "--nv", "IMAGE", "a b"]
    done = subprocess.run(
        words, env=environ, cwd="/", capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == f"exec {bound}--nv IMAGE a b\n", done.stderr


@pytest.mark.parametrize(
    ("python", "path"), [("python3", "/usr/local/sbin:"), ("/x/python3", "/h")]
)
def test_packages_of_home_and_the_hosts_programs_stay_outside(python: str, path: str) -> None:
    """Charliecloud keeps the host's PATH, in which a virtual environment beside the code may be."""
    values = {"software.container.image": "/i", "software.container.runtime": "charliecloud"}
    job = KEYS.build({**values, "task": "t", "software.container.python": python})
    template = resources.folder("templates").joinpath("software.sh.j2").read_text()
    (line,) = re.findall(r"^inner=.*$", template, re.MULTILINE)
    line = jinja2.Template(line).render(software=software_facts.facts(job))
    done = subprocess.run(
        ["/bin/bash", "-c", f'ENVIRONMENT=(A=1)\n{line}\n"${{inner[@]}}" /usr/bin/env'],
        env={"PATH": "/h:/usr/bin"}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    found = dict(row.partition("=")[::2] for row in done.stdout.splitlines())
    assert found["PYTHONNOUSERSITE"] == found["A"] == "1"
    assert found["PATH"].startswith(path)


def test_variables_of_the_hosts_python_and_loader_stay_outside() -> None:
    template = resources.folder("templates").joinpath("software.sh.j2").read_text()
    lines = [*re.findall(r"^hidden=.*$", template, re.MULTILINE), 'env "${hidden[@]}" /usr/bin/env']
    host = {"PYTHONPATH": "/h", "PYTHONHOME": "/h", "LD_LIBRARY_PATH": "/h", "LD_AUDIT": ""}
    done = subprocess.run(
        ["/bin/bash", "-c", "\n".join(lines)], env={"PATH": "/usr/bin", "RANK": "3"} | host,
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    names = {row.partition("=")[0] for row in done.stdout.splitlines()}
    assert "RANK" in names and not names & {*host}
