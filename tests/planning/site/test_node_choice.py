import pytest
from sites import Site, flags, nodes

from hpcddp.planning.site.node_choice import has_features
from hpcddp.rundir import RunDir

KINDS = (
    ("gpu*", 64, "gpu:8"), ("gpu*", 32, "gpu:4"), ("big", 192, "gpu:4"), ("cpu", 12, "(null)"),
)  # fmt: skip


@pytest.fixture
def cluster(site: Site) -> Site:
    site.slurm(sinfo=nodes(*KINDS), scontrol="exit 0")
    return site


@pytest.mark.parametrize(
    ("partition", "gpus", "cpus"),
    [
        ("", 4, 8),
        ("", 8, 8),  # the nodes with four GPUs are not meant
        ("big", 4, 48),
        ("big,gpu", 4, 8),  # Slurm takes either: the smaller share fits both
        ("cpu", 4, 3),
        ("big", 8, 24),  # none has eight: Slurm says so itself
        ("unknown", 4, 1),
    ],
)
def test_the_share_is_that_of_the_nodes_that_a_job_can_get(
    cluster: Site, partition: str, gpus: int, cpus: int
) -> None:
    more = [("slurm.partition", partition)] if partition else []
    assert cluster.plan(flags(("gpus", gpus), *more)).cpus_per_task == cpus


def test_a_feature_chooses_among_nodes(site: Site) -> None:
    rows = ["gpu*|idle|2|64|2|1|gpu:4|a100|n1", "gpu*|idle|2|16|2|1|gpu:4|t4,ib|n2"]
    site.slurm(sinfo="\n".join(f"echo '{row}'" for row in rows), scontrol="exit 0")
    assert site.plan(flags(("gpus", 4))).cpus_per_task == 4
    wanted = flags(("gpus", 4), ("slurm.constraint", "a100&ib"))
    assert site.plan(wanted).cpus_per_task == 4
    assert site.plan(flags(("gpus", 4), ("slurm.constraint", "[a100]"))).cpus_per_task == 16


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        ("a100", True), ("a100&hbm80g", False), ("a100,ib", True), ("t4|ib", True),
        ("t4|h100", False), ("[t4|ib]", True), ("ib*2&t4*2", True), ("(t4&h100)|v100", False),
        ("", False),
    ],
)  # fmt: skip
def test_the_features_of_a_constraint(constraint: str, fits: bool) -> None:
    assert has_features(constraint, ("a100", "ib")) is fits


def test_a_partition_without_gpus_is_asked_for_none(cluster: Site) -> None:
    plan = cluster.plan(flags(("gpus", 4), ("slurm.partition", "cpu")))
    options = dict(plan.directives(RunDir("/runs/toy-1")))
    assert "gpus-per-node" not in options and options["ntasks-per-node"] == 4
    assert "partition cpu has no GPUs: 4 processes per node run on CPUs" in plan.notes
