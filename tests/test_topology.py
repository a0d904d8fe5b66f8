import itertools
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RankMapError, TopologyError
from hpcddp.topology import Rank, Topology, map_rows

SIZES = st.integers(1, 12)


@st.composite
def ranks(draw: st.DrawFn) -> tuple[Topology, Rank]:
    topology = Topology(draw(SIZES), draw(SIZES))
    return topology, topology.rank_of(draw(st.integers(0, topology.world_size - 1)))


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
SLURM_COUNTED = {name: SLURM[name] for name in SLURM if "TASKS_PER" not in name} | {
    "SLURM_NNODES": "2"
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
RANK_5 = Rank(world_rank=5, world_size=8, local_rank=1, local_size=4, node=1)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-2, 4), (True, 4), (2.0, 4), ("2", 4)])
def test_a_map_of_nothing_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(TopologyError, match=r"invalid size: .* nodes with"):
        Topology(*sizes)


def test_the_map_of_two_nodes_with_four_gpus() -> None:
    topology = Topology(2, 4)
    assert topology.world_size == 8
    assert [(rank.node, rank.local_rank) for rank in topology.ranks()] == list(
        itertools.product(range(2), range(4))
    )
    assert topology.rank_of(5) == RANK_5
    assert str(RANK_5) == "rank 5(8), node 1(2), local 1(4)"
    assert RANK_5.nodes == 2 and Rank(0, 1, 0, 1, 0).nodes == 1


@given(ranks())
def test_rank_and_place_are_inverse(case: tuple[Topology, Rank]) -> None:
    topology, rank = case
    assert topology.rank(rank.node, rank.local_rank) == rank.world_rank
    rank.check(topology)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((2, 0), "node must be from 0 to 1, got 2"),
        ((-1, 0), "node must be from 0 to 1, got -1"),
        ((0, 4), "local rank must be from 0 to 3, got 4"),
    ],
)
def test_a_place_that_is_not_on_the_map(place: tuple[int, int], message: str) -> None:
    with pytest.raises(TopologyError, match=message) as caught:
        Topology(2, 4).rank(*place)
    assert "more nodes" in caught.value.hint


@pytest.mark.parametrize("number", [8, -1])
def test_a_rank_that_is_not_on_the_map(number: int) -> None:
    with pytest.raises(TopologyError, match=f"global rank must be from 0 to 7, got {number}"):
        Topology(2, 4).rank_of(number)


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM, SLURM_COUNTED, OPENMPI, PMI])
def test_every_launcher_says_the_same_rank(environ: dict[str, str]) -> None:
    assert Rank.from_env({**environ, "PATH": "/bin"}) == RANK_5


def test_without_a_launcher_the_world_is_one_process() -> None:
    assert Rank.from_env({"PATH": "/bin"}) == Rank(0, 1, 0, 1, 0)


def test_inside_srun_torchrun_is_believed() -> None:
    node_number = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    assert Rank.from_env({**node_number, **TORCHRUN}) == RANK_5


def test_in_a_batch_script_mpirun_is_believed() -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert Rank.from_env(script | OPENMPI) == RANK_5


@given(ranks())
def test_to_env_is_the_inverse_of_from_env(case: tuple[Topology, Rank]) -> None:
    _, rank = case
    assert Rank.from_env(rank.to_env()) == rank


@given(ranks(), st.sampled_from(["step", "allocation", "counted"]))
def test_slurm_says_the_local_size_in_three_ways(case: tuple[Topology, Rank], way: str) -> None:
    topology, rank = case
    tasks = f"{topology.gpus_per_node}(x{topology.nodes})"
    environ = {
        "SLURM_PROCID": str(rank.world_rank),
        "SLURM_NTASKS": str(rank.world_size),
        "SLURM_LOCALID": str(rank.local_rank),
        "SLURM_NODEID": str(rank.node),
    }
    environ |= {
        "step": {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_TASKS_PER_NODE": "99"},
        "allocation": {"SLURM_TASKS_PER_NODE": tasks},
        "counted": {"SLURM_NNODES": str(topology.nodes)},
    }[way]
    assert Rank.from_env(environ) == rank


@pytest.mark.parametrize(("node", "size"), [(0, 4), (1, 4), (2, 3)])
def test_nodes_of_different_sizes(node: int, size: int) -> None:
    environ = SLURM | {
        "SLURM_NTASKS": "11",
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    }
    rank = Rank.from_env(environ)
    assert rank.local_size == size
    with pytest.raises(RankMapError, match="expected 12 ranks, 4 on each node"):
        rank.check(Topology(3, 4))


@pytest.mark.parametrize(
    ("dialect", "environ"),
    [("torchrun", TORCHRUN), ("slurm", SLURM_COUNTED), ("openmpi", OPENMPI), ("pmi", PMI)],
)
def test_a_missing_or_broken_variable_is_named_with_its_dialect(
    dialect: str, environ: dict[str, str]
) -> None:
    rank_variable, *companions = environ
    for name in companions:
        rest = {key: value for key, value in environ.items() if key != name}
        with pytest.raises(TopologyError, match=f"{name}.* is not set") as caught:
            Rank.from_env(rest)
        assert caught.value.where == f"{dialect} environment"
    for name, text in itertools.product(environ, ["", "x", "-1", "1.5", "٣", "\x1b"]):
        with pytest.raises(TopologyError, match=name) as caught:
            Rank.from_env(environ | {name: text})
        assert caught.value.where == f"{dialect} environment"
        assert rank_variable in caught.value.hint


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "8"}, "global rank must be from 0 to 7, got 8"),
        ({"LOCAL_RANK": "4"}, "local rank must be from 0 to 3, got 4"),
        ({"WORLD_SIZE": "0"}, "cannot have 4 of 0 ranks"),
        ({"LOCAL_WORLD_SIZE": "0"}, "cannot have 0 of 8 ranks"),
        ({"GROUP_RANK": "8"}, "node must be from 0 to 7, got 8"),
    ],
)
def test_numbers_that_contradict_each_other(changed: dict[str, str], message: str) -> None:
    with pytest.raises(TopologyError, match=message) as caught:
        Rank.from_env(TORCHRUN | changed)
    assert caught.value.where == "torchrun environment"


@pytest.mark.parametrize("tasks", ["4", "4(x1),x", "4(x"])
def test_a_task_list_without_this_node(tasks: str) -> None:
    with pytest.raises(TopologyError, match="without a number for node 1"):
        Rank.from_env(SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks})


def test_tasks_that_cannot_be_even() -> None:
    with pytest.raises(TopologyError, match="8 tasks do not divide over 3 nodes"):
        Rank.from_env(SLURM_COUNTED | {"SLURM_NNODES": "3"})


def test_a_cyclic_distribution_is_refused() -> None:
    cyclic = Rank(world_rank=1, world_size=8, local_rank=0, local_size=4, node=1)
    with pytest.raises(RankMapError) as caught:
        cyclic.check(Topology(2, 4))
    assert "rank 1(8), node 1(2), local 0(4)" in caught.value.what
    assert "expected rank 4" in caught.value.what
    assert "--distribution=block" in caught.value.hint


@pytest.mark.parametrize("planned", [Topology(4, 4), Topology(4, 2)])
def test_another_size_than_planned_is_refused(planned: Topology) -> None:
    with pytest.raises(RankMapError, match=f"expected {planned.world_size} ranks?, "):
        RANK_5.check(planned)


def test_rows_name_the_hosts_of_the_nodes() -> None:
    assert list(map_rows(Topology(2, 2), ["a", "b"])) == [
        (0, 0, "a", 0),
        (1, 0, "a", 1),
        (2, 1, "b", 0),
        (3, 1, "b", 1),
    ]
    assert next(map_rows(Topology(1, 1))) == (0, 0, None, 0)


@pytest.mark.parametrize("hosts", [[], ["a"], ["a", "b", "c"]])
def test_hosts_that_do_not_match_are_refused_before_the_first_row(hosts: list[str]) -> None:
    with pytest.raises(TopologyError, match=f"{len(hosts)} hosts? for 2 nodes"):
        map_rows(Topology(2, 2), hosts)


def test_nothing_is_kept_per_rank() -> None:
    topology = Topology(10_000, 8)
    tracemalloc.start()
    try:
        assert sum(1 for _ in map_rows(topology)) == 80_000
        assert sum(1 for _ in itertools.islice(topology.ranks(), 10_000)) == 10_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000  # bytes: less than one per rank


def test_only_the_standard_library_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); import hpcddp.topology, hpcddp.slurm.hostlist;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(*new - sys.stdlib_module_names)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hpcddp"]
