import pytest
import recorded
from sites import Site

from hpcddp.errors import SlurmUnreachable
from hpcddp.planning.site import detection

MOST = 8  # calls of Slurm's programs


def test_a_cluster_is_read_in_few_calls(site: Site) -> None:
    recorded.install(site, "plain")
    facts = detection.read()
    assert (facts.cluster, facts.version) == ("plain", "23.11.10")
    assert [row.name for row in facts.partitions] == ["cpu", "gpu", "gpu-debug", "admin"]
    assert set(facts.samples) == {"c1", "g1", "g13"} and facts.unread == {}
    assert (facts.default_account, len(facts.associations), len(facts.qos)) == ("biology", 2, 3)
    assert facts.reservations[0].maintenance
    assert [(row.account, row.left("gres/gpu")) for row in facts.budgets] == [("vision", 1200.0)]
    assert len(recorded.calls(site)) <= MOST


@pytest.mark.parametrize("part", list(detection.PARTS))
def test_a_part_that_cannot_be_read_is_named(site: Site, part: str) -> None:
    recorded.install(site, "plain")
    program, words = {
        "partitions": ("scontrol", "*'show partition'*"), "nodes": ("sinfo", "*"),
        "samples of nodes": ("scontrol", "*'show node'*"),
        "accounts": ("sacctmgr", "*'show user'*"), "QOS": ("sacctmgr", "*'show qos'*"),
        "budgets": ("sshare", "*"),
        "reservations": ("scontrol", "*'show reservation'*"),
    }[part]  # fmt: skip
    path = site.bin / program
    broken = f"{words}) echo 'x: error: private' >&2; exit 1;;\n"
    path.write_text(path.read_text().replace('case "$*" in\n', f'case "$*" in\n{broken}'))
    facts = detection.read()
    assert list(facts.unread) == [part] and "private" in facts.unread[part]
    assert facts.cluster == "plain"


def test_without_accounting_nobody_asks_for_it(site: Site) -> None:
    recorded.install(site, "plain")
    path = site.bin / "scontrol"
    path.write_text(path.read_text().replace("cat", "sed s/slurmdbd/none/"))
    (site.bin / "sed").symlink_to("/usr/bin/sed")
    facts = detection.read()
    assert facts.unread == {
        "accounts": "this Slurm has no accounting",
        "QOS": "this Slurm has no accounting",
    }
    assert not any(call.startswith("sacctmgr") for call in recorded.calls(site))


def test_a_controller_that_is_away_is_an_error(site: Site) -> None:
    site.program("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmUnreachable):
        detection.read()
