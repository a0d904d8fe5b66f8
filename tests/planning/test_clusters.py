import os
from pathlib import Path

import pytest
from sites import Site

from hpcddp.errors import ClusterError
from hpcddp.planning import clusters


def test_the_shipped_profiles_are_known(site: Site) -> None:
    assert clusters.load("slurm").cluster.backend == "slurm"
    assert clusters.load("local").cluster.backend == "local"


def test_a_profile_of_ones_own_hides_a_shipped_one(site: Site) -> None:
    mine = site.profile("slurm", "nodes = 7")
    assert clusters.load("slurm").path == mine
    assert clusters.load("slurm").cluster.nodes == 7


def test_a_profile_may_be_a_path(site: Site) -> None:
    site.write("sites/a b.toml", 'gpu_type = "a100"')
    profile = clusters.load("sites/a b.toml")
    assert (profile.name, profile.cluster.gpu_type) == ("a b", "a100")
    assert profile.path.is_absolute()


def test_the_site_file_is_what_slurm_stands_for(site: Site) -> None:
    path = site.write("site.toml", "cpus_per_gpu = 8")
    environ = {**os.environ, "HPCDDP_SITE_CONFIG": str(path)}
    assert clusters.load("slurm", environ).name == "site"
    assert clusters.load("local", environ).cluster.backend == "local"


def test_a_site_file_that_is_gone_is_named(site: Site) -> None:
    with pytest.raises(ClusterError, match="no such file") as caught:
        clusters.load("slurm", {**os.environ, "HPCDDP_SITE_CONFIG": "/gone/site.toml"})
    assert caught.value.where == "/gone/site.toml"


def test_an_unknown_cluster_names_the_nearest_and_where_one_goes(site: Site) -> None:
    site.profile("greatlakes", "")
    with pytest.raises(ClusterError, match="unknown cluster 'greatlake'") as caught:
        clusters.load("greatlake")
    assert caught.value.hint == "did you mean greatlakes?"
    assert caught.value.where == str(site.config / "hpcddp" / "clusters")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("node = 3", "unknown key 'node'"),
        ("nodes = -1", "nodes is -1, but must be at least 0"),
        ("gpu_option = 'gpus'", "one of gpus-per-node, gres, none"),
        ("modules = 'cuda'", "a list of strings"),
        ("nodes = ", "is not TOML"),
        ("[variables]\nA = [1]", "variables.A"),
        ('[slurm]\nqos = "a\\u001b[0m"', "control character"),
    ],
)
def test_what_a_profile_cannot_say(site: Site, text: str, what: str) -> None:
    path = site.profile("bad", text)
    with pytest.raises(ClusterError, match=what) as caught:
        clusters.load("bad")
    assert caught.value.where == str(path)


def test_what_it_says_of_a_job_is_a_layer(site: Site) -> None:
    text = 'launcher = "srun"\n[slurm]\ncpus_per_task = 3\n[env]\nA = "1"\n'
    profile = clusters.read(site.profile("mine", text))
    layer = profile.layer()
    assert layer.values == {"slurm.cpus-per-task": 3, "env.A": "1", "launcher": "srun"}
    assert set(layer.sources.values()) == {str(profile.path)}


def test_every_shipped_profile_has_its_template() -> None:
    folder = Path(clusters.folders({"HOME": "/"})[-1])
    for path in folder.glob("*.toml"):
        assert (folder.parent / clusters.read(path).cluster.template).is_file()
