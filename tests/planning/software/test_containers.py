"""The command of each runtime, beside what its documentation shows."""

import itertools
import shlex
import subprocess
from pathlib import Path

import pytest

from hpcddp.planning.software import containers
from hpcddp.planning.software.containers import CONTAINERS
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
