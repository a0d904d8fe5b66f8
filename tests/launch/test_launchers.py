import importlib.machinery
import importlib.util
import sys

import pytest
from sites import Site, flags

from hpcddp.cli.options import STARTERS
from hpcddp.errors import UserError
from hpcddp.launch import launchers
from hpcddp.planning import resources
from hpcddp.planning.jobfile import Layer


def test_a_backend_has_a_launcher_of_its_own() -> None:
    assert launchers.own("slurm") == "srun"
    assert launchers.own("local") == "spawn"


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_task_is_forked_where_torch_can_be_imported(
    site: Site, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = Layer()
    flags.put("cluster", cluster, "--cluster")
    assert site.plan(flags, "toy").launcher.name == "fork"
    site.write("train.py", "")
    script = Layer()
    script.put("cluster", cluster, "--cluster")
    script.put("command", [sys.executable, "train.py"], "--")
    assert site.plan(script, None).launcher.name == launchers.own(cluster)
    fork = launchers.LAUNCHERS["fork"]
    monkeypatch.setitem(
        launchers.LAUNCHERS, "fork", fork._replace(missing=lambda job, profile: "no torch")
    )
    assert site.plan(flags, "toy").launcher.name == launchers.own(cluster)


@pytest.mark.parametrize(
    ("name", "backend", "what"),
    [
        ("spawn", "slurm", "does not work with backend slurm"),
        ("srum", "slurm", "unknown launcher 'srum'"),
    ],
)
def test_a_launcher_that_cannot_be_used(name: str, backend: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        launchers.find(name, backend, "toy.toml")
    assert caught.value.where == "toy.toml"
    assert "srun" in caught.value.hint


@pytest.mark.parametrize("row", launchers.LAUNCHERS.values(), ids=lambda row: row.name)
def test_every_launcher_has_its_fragment(row: launchers.Launcher) -> None:
    assert (resources.folder("templates") / row.fragment).is_file()


@pytest.mark.parametrize(
    ("pmix", "mpirun", "served"),
    [(True, False, True), (False, True, True), (False, False, False)],
)
def test_an_mpi_that_the_site_has_not_is_told(
    site: Site, pmix: bool, mpirun: bool, served: bool
) -> None:
    no = "echo 'srun: error: MPI: Unable to load any plugin' >&2; exit 1"
    site.program("srun", "echo 'srun: Job 6 to start' >&2" if pmix else no)
    if mpirun:
        site.program("mpirun", "exit 0")
    flags = Layer()
    flags.put("launcher", "mpi", "--launcher")
    if served:
        assert site.plan(flags).launcher.name == "mpi"
        return
    with pytest.raises(UserError, match="no PMIx plugin") as caught:
        site.plan(flags)
    assert caught.value.hint == "use --launcher srun"


@pytest.mark.parametrize("launcher", ["fork", "torchrun"])
def test_a_launcher_that_imports_torch_where_it_is_not(
    site: Site, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    for where in (importlib.util, importlib.machinery.PathFinder):
        monkeypatch.setattr(
            where, "find_spec", lambda name: None if name == "torch" else find(name)
        )
    flags = Layer()
    flags.put("launcher", launcher, "--launcher")
    with pytest.raises(UserError, match="torch is not installed in"):
        site.plan(flags)


def test_a_node_whose_name_speaks_of_mpi_lacks_none(site: Site) -> None:
    site.program("srun", "echo 'srun: Job 6 to start at 12:00 on nodes mpi01' >&2; exit 1")
    flags = Layer()
    flags.put("launcher", "mpi", "--launcher")
    assert site.plan(flags).launcher.name == "mpi"


def test_the_help_of_submit_names_each_launcher() -> None:
    """It cannot import the table: that takes time."""
    assert sorted(STARTERS.split(", ")) == sorted(launchers.LAUNCHERS)


def test_spares_take_any_command(site: Site) -> None:
    site.write("train.sh", "")
    plan = site.plan(flags(("command", ["bash", "train.sh"]), ("spares", 1), ("gpus", 2)), None)
    assert plan.launcher.name == "fork" and plan.outlives_nodes and plan.checks_nodes
    assert not [note for note in plan.notes if "spares" in note]  # no Python that torch is for
    site.write("train.py", "")
    plan = site.plan(flags(("command", [sys.executable, "train.py"]), ("spares", 1)), None,
                     runs=site.runs)  # fmt: skip
    assert [note for note in plan.notes if "imports torch before the script runs" in note]


def test_no_job_loses_its_head_unnoticed(site: Site) -> None:
    """From a container, no node can ask Slurm; and what is not to come back is left to Slurm."""
    assert site.plan(flags(("nodes", "2-3"))).outlives_nodes
    assert not site.plan(flags(("nodes", "2-3"), ("requeue.enabled", False))).outlives_nodes
    image = flags(("software.container.image", "torch.sif"), ("spares", 1))
    with pytest.raises(UserError, match="spares does not work with a container"):
        site.plan(image)


def test_spares_of_a_job_file_are_left_out_on_one_machine(site: Site) -> None:
    site.job("spared", "global_batch = 8\nspares = 1\n")
    plan = site.plan(flags(("cluster", "local")), job="spared")
    assert not plan.spec.spares and "spares is left out: this machine is one node" in plan.notes
    with pytest.raises(UserError, match="spares requires Slurm"):
        site.plan(flags(("cluster", "local"), ("spares", 1), where="--spares"))
