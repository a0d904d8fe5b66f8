import dataclasses
from collections.abc import Callable

import pytest
import recorded
from sites import Site

from hpcddp.planning.site import choices, detection, verdicts
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.slurm.node_kinds import Gpus, NodeKind
from hpcddp.slurm.partitions import Partition

Change = Callable[[SiteFacts], None]


@pytest.fixture
def facts(site: Site) -> SiteFacts:
    recorded.install(site, "plain")
    return detection.read()


def values(facts: SiteFacts) -> dict[str, object]:
    return {row.key: row.value for row in choices.of(facts)}


def comment(facts: SiteFacts, key: str) -> str:
    return next(row.comment for row in choices.of(facts) if row.key == key)


def kind(partition: str, *gpus: Gpus, **more: object) -> NodeKind:
    made = NodeKind(partition, False, 2, 64, 2, 250_000, gpus, (), "x[1-2]", {"idle": 2})
    return dataclasses.replace(made, **more)


def test_each_value_has_its_reason(facts: SiteFacts) -> None:
    assert values(facts) == {
        "description": "plain: Slurm 23.11.10",
        "gpu_option": "gpus-per-node",
        "gpu_type": "a100",
        "cpus_per_gpu": 30,  # of the 120 that eight reserved cores leave
        "slurm.partition": "gpu",
        "slurm.account": "vision",
        "slurm.qos": "gpu",
    }
    assert comment(facts, "gpu_option") == "gpu has 4 a100 on 12 nodes, 8 h100 on 2 nodes"
    assert comment(facts, "slurm.partition") == (
        "guess: the default, cpu, has no GPUs; others with GPUs: gpu-debug"
    )
    assert comment(facts, "slurm.account") == "guess: your default account may not use gpu"


def test_a_default_partition_with_gpus_needs_no_name(facts: SiteFacts) -> None:
    facts.partitions[0].default, facts.partitions[1].default = False, True
    assert "slurm.partition" not in values(facts)


def test_without_gpus_none_are_requested(facts: SiteFacts) -> None:
    facts.kinds = [row for row in facts.kinds if not row.gpus]
    assert values(facts)["gpu_option"] == "none"
    assert "slurm.partition" not in values(facts) and "cpus_per_gpu" not in values(facts)


def test_gpus_of_nodes_that_are_drained_can_be_requested_later(facts: SiteFacts) -> None:
    for row in facts.kinds:
        row.states = {"drained": row.nodes} if row.gpus else row.states
    assert values(facts)["gpu_option"] == "gpus-per-node"
    assert comment(facts, "gpu_option").startswith("partition cpu has no GPUs; these have: gpu, ")
    (trial,) = verdicts.run(facts, choices.of(facts), lambda script: (True, ""))
    assert not trial.request.partition and not trial.request.gpus  # cpu has none


def test_a_feature_names_the_gpu_where_no_resource_does(facts: SiteFacts) -> None:
    facts.kinds = [kind("gpu", features=("haswell", "p100", "gpu"))]
    assert values(facts)["gpu_option"] == "none"
    assert values(facts)["slurm.constraint"] == "p100"


def test_slices_are_not_the_guess_beside_whole_gpus(facts: SiteFacts) -> None:
    facts.kinds = [
        kind("gpu", Gpus("a100", 2), nodes=3),
        kind("gpu", Gpus("a100_1g.5gb", 28), nodes=9),
    ]
    assert values(facts)["gpu_type"] == "a100"
    assert values(facts)["cpus_per_gpu"] == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda row: setattr(row, "state", "DOWN"),
        lambda row: setattr(row, "root_only", True),
        lambda row: setattr(row, "groups", ("no-such-group",)),
        lambda row: setattr(row, "accounts", ("speech",)),
        lambda row: setattr(row, "denied_accounts", ("vision", "biology")),
    ],
)
def test_a_partition_that_is_closed_to_the_user_is_no_guess(
    facts: SiteFacts, change: Callable[[Partition], None]
) -> None:
    change(facts.partitions[1])
    assert values(facts)["slurm.partition"] == "gpu-debug"


def test_a_partition_whose_nodes_are_down_is_no_guess(facts: SiteFacts) -> None:
    for row in facts.kinds_of("gpu"):
        row.states = {"drained": row.nodes}
    assert values(facts)["slurm.partition"] == "gpu-debug"


def test_an_older_selection_of_nodes_has_only_gres(facts: SiteFacts) -> None:
    facts.config["SelectType"] = "select/linear"
    assert values(facts)["gpu_option"] == "gres"


def test_without_accounting_there_is_neither_account_nor_qos(facts: SiteFacts) -> None:
    facts.associations, facts.default_account = [], ""
    assert not {"slurm.account", "slurm.qos"} & values(facts).keys()


def test_a_cluster_of_which_nothing_is_known_has_a_profile() -> None:
    assert values(SiteFacts("", "", 0.0)) == {"description": "Slurm", "gpu_option": "none"}


def test_the_usual_size_counts_the_gpus_of_the_usual_type(facts: SiteFacts) -> None:
    facts.kinds = [kind("gpu", Gpus("a100", 2), Gpus("v100", 2), nodes=2)]
    assert values(facts)["gpu_type"] == "a100"
    assert choices.usual_size(facts) == (2, 2)


@pytest.mark.parametrize(
    ("change", "size"),
    [
        (lambda facts: None, (2, 4)),
        (lambda facts: setattr(facts.partitions[1], "max_nodes", 1), (1, 4)),
        (lambda facts: setattr(facts.partitions[1], "min_nodes", 10), (10, 4)),
        (lambda facts: facts.associations[1].max_tres.update(node=1), (1, 4)),
        (lambda facts: facts.qos[1].max_tres.update({"gres/gpu": 9}), (2, 4)),
        (lambda facts: facts.associations[1].group_tres.update({"gres/gpu:a100": 2}), (1, 2)),
        (lambda facts: facts.associations[1].node_tres.update({"gres/gpu": 3}), (2, 3)),
    ],
)
def test_the_usual_size_is_within_the_limits(
    facts: SiteFacts, change: Change, size: tuple[int, int]
) -> None:
    change(facts)
    assert choices.usual_size(facts) == size
