"""[software] of a job over that of a profile."""

import pytest
from sites import Site, flags

from hpcddp.errors import ClusterError, UserError
from hpcddp.planning import clusters
from hpcddp.planning.software.software_keys import is_path


def test_a_profile_gives_modules_under_either_name(site: Site) -> None:
    for text in ("modules = ['cuda']", "software.modules = ['cuda']"):
        site.profile("mine", text)
        assert site.plan(flags(("cluster", "mine"))).spec.software.modules == ["cuda"]


def test_both_names_at_once_are_an_error(site: Site) -> None:
    path = site.profile("mine", "modules = ['a']\nsoftware.modules = ['b']")
    with pytest.raises(ClusterError, match=r"modules and software\.modules are both set"):
        clusters.read(path)


def test_a_job_has_one_python_and_its_own_replaces_that_of_the_profile(site: Site) -> None:
    site.profile("mine", "[software.container]\nimage = '/a.sif'\nruntime = 'singularity'")
    plan = site.plan(flags(("cluster", "mine"), ("software.venv", "/venv")))
    assert plan.spec.software.venv == "/venv"
    assert plan.spec.software.container.image == ""
    assert plan.worker_command(plan_run(site))[0] == "/venv/bin/python"
    image = site.plan(flags(("cluster", "mine"), ("software.container.image", "/b.sif")))
    assert image.spec.software.container.runtime == "singularity"


def plan_run(site: Site):
    from hpcddp.rundir import RunDir

    return RunDir(site.runs / "toy-1")


def test_two_pythons_in_one_place_are_an_error(site: Site) -> None:
    with pytest.raises(UserError, match="both set, but the ranks have one Python"):
        site.plan(flags(("software.venv", "/venv"), ("software.conda", "train")))


def test_paths_begin_at_the_file_that_has_them(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/ann")
    profile = site.profile("mine", "software.setup = ['true']\nsoftware.venv = 'env'")
    plan = site.plan(flags(("cluster", "mine")))
    assert plan.spec.software.venv == str(profile.parent / "env")
    site.job("own", "software.venv = '$SCRATCH/env'\nmax_steps = 1")
    assert site.plan(job="own").spec.software.venv == "/scratch/ann/env"
    monkeypatch.delenv("SCRATCH")
    with pytest.raises(UserError, match="a variable that is not set here"):
        site.plan(job="own")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/images/torch", True),
        ("torch.sif", True),
        ("~/torch.sqsh", True),
        ("./torch", True),
        ("nvcr.io#nvidia/pytorch:25.01-py3", False),
        ("docker://ubuntu:22.04", False),
        ("torch", False),
    ],
)
def test_an_image_is_a_path_or_a_name(name: str, path: bool) -> None:
    assert is_path("software.container.image", name) is path


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([("launcher", "horovod")], "launcher horovod does not work in a container"),
        ([("software.container.binds", ["/a:/b:rw"])], "invalid bind"),
        ([("software.container.runtime", "pyxis"), ("cluster", "local")], "with backend local"),
    ],
)
def test_a_container_that_cannot_start_is_refused(
    site: Site, values: list, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcddp.launch import launchers

    row = launchers.LAUNCHERS["horovod"]._replace(missing=launchers.nothing)
    monkeypatch.setitem(launchers.LAUNCHERS, "horovod", row)
    with pytest.raises(UserError, match=said):
        site.plan(flags(("software.container.image", "/torch"), *values))


@pytest.mark.parametrize(
    ("runtime", "kind", "refused"),
    [
        ("podman-hpc", "rocm", True),
        ("shifter", "rocm", True),
        ("podman-hpc", "nvidia", False),
        ("podman-hpc", "none", False),
        ("apptainer", "rocm", False),
        ("enroot", "rocm", False),  # its hooks make GPUs visible
    ],
)
def test_gpus_that_a_runtime_cannot_make_visible_are_refused(
    site: Site, runtime: str, kind: str, refused: bool
) -> None:
    values = {"image": "/torch", "runtime": runtime, "gpus": kind}
    layer = flags(*((f"software.container.{name}", value) for name, value in values.items()))
    if not refused:
        assert site.plan(layer).spec.software.container.gpus == kind
        return
    with pytest.raises(UserError) as caught:
        site.plan(layer)
    assert caught.value.what == f"runtime {runtime} has no option for rocm GPUs"
    assert caught.value.where == "--set"
    assert caught.value.hint.startswith("use one of apptainer, singularity, charliecloud, ")
    assert runtime not in caught.value.hint
