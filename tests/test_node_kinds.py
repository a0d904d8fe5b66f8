import pytest
from sites import Site

from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import node_kinds
from hpcddp.slurm.node_kinds import Gpus

ROWS = """\
gpu*|mixed|3|128|2|515000|gpu:a100:4(S:0-1)|a100,ib|g[1-3]
gpu*|idle~|2|128|2|515000|gpu:a100:4(S:0-1)|a100,ib|g[4-5]
gpu*|down*|1|128|2|515000|gpu:a100:4(S:0-1)|a100,ib|g6
gpu*|idle*|1|128|2|515000|gpu:a100:4(S:0-1)|a100,ib|g7
cpu|allocated|100|64|2|257000|(null)|(null)|c[1-100]
cpu|drained~|4|64|2|257000|(null)|(null)|c[101-104]
"""


def test_rows_of_one_kind_are_one_with_their_states(site: Site) -> None:
    site.program("sinfo", f"cat <<'E'\n{ROWS}E")
    gpu, cpu = node_kinds.read()
    assert (gpu.partition, gpu.default, gpu.nodes, gpu.cpus) == ("gpu", True, 7, 128)
    assert gpu.gpus == (Gpus("a100", 4),) and gpu.features == ("a100", "ib")
    assert gpu.hosts == "g[1-3],g[4-5],g6,g7"
    assert gpu.states == {"mixed": 3, "powered_down": 2, "down": 1, "no_respond": 1}
    assert (gpu.usable, gpu.asleep) == (5, 2)
    assert (cpu.default, cpu.nodes, cpu.usable, cpu.gpus, cpu.features) == (False, 104, 100, (), ())


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", []),
        ("gpu:4", [("", 4)]),
        ("gpu:a100:4(S:0-1)", [("a100", 4)]),
        ("gpu:a:1,gpu:b:2,nvme:1", [("a", 1), ("b", 2)]),
        ("gpu:tesla_v100-sxm2-32gb:2(S:0,1),lscratch:800", [("tesla_v100-sxm2-32gb", 2)]),
        ("craynetwork:4,gpu:mi250:8", [("mi250", 8)]),
        ("gpu:no_consume:2", [("", 2)]),
        ("gpu", [("", 1)]),
        ("gpu:h100", [("h100", 1)]),
        ("shard:a100:8,gpu:a100:1", [("a100", 1)]),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", [("a100", 4)]),
    ],
)
def test_the_gpus_of_generic_resources(gres: str, gpus: list[tuple[str, int]]) -> None:
    assert [(row.type, row.count) for row in node_kinds.gpus(gres)] == gpus


@pytest.mark.parametrize(
    ("name", "sliced"),
    [
        ("a100_1g.5gb", True), ("1g.10gb", True), ("nvidia_a100_3g.20gb", True),
        ("1g.10gb+me", True), ("a100", False), ("a100-sxm4-80gb", False), ("", False),
    ],
)  # fmt: skip
def test_a_slice_is_known_by_its_name(name: str, sliced: bool) -> None:
    assert Gpus(name, 1).sliced == sliced


def test_a_slurm_that_does_not_answer_is_no_empty_cluster(site: Site) -> None:
    site.program("sinfo", "echo 'slurm_load_partitions: Unable to contact x' >&2; exit 1")
    with pytest.raises(SlurmUnreachable):
        node_kinds.read()
