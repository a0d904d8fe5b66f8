"""A strategy's text, the mesh that it makes, and the places in it."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import UserError
from hpcddp.strategy import STRATEGIES, Layout, layout, parse, processes

SIZES = st.integers(1, 5)
MESHES = st.builds(Layout, SIZES, SIZES, SIZES, SIZES)


@given(MESHES)
def test_a_rank_has_one_place_and_a_place_one_rank(mesh: Layout) -> None:
    places = [mesh.place(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.world_size))
    assert len(set(places)) == math.prod(mesh[:4]) == mesh.world_size
    assert all(0 <= at < size for place in places for at, size in zip(place, mesh[:4], strict=True))


@given(MESHES)
def test_a_batch_is_divided_over_replicas_and_over_who_divides_parameters(mesh: Layout) -> None:
    shares: dict[int, set[tuple[int, int]]] = {}
    for rank in range(mesh.world_size):
        place = mesh.place(rank)
        shares.setdefault(mesh.data_rank(rank), set()).add((place.ddp, place.fsdp))
    assert sorted(shares) == list(range(mesh.data_size))
    assert all(len(same) == 1 for same in shares.values())


@given(MESHES)
def test_ranks_that_compute_one_layer_together_are_neighbours_with_one_stream(
    mesh: Layout,
) -> None:
    for rank in range(mesh.world_size):
        first = rank - mesh.place(rank).tp
        assert mesh.stream(rank) == mesh.stream(first) == first // mesh.tp
        assert mesh.data_rank(rank) == mesh.data_rank(first)


@given(MESHES)
def test_the_columns_are_the_places_rank_by_rank(mesh: Layout) -> None:
    names, rows = mesh.columns()
    found = [dict(zip(names, row, strict=True)) for row in rows]
    if mesh.plain:
        assert (names, found) == ([], [])
        return
    wide = [name for name in ("pp", "ddp", "fsdp", "tp") if getattr(mesh, name) > 1]
    assert found == [
        {name: getattr(mesh.place(rank), name) for name in wide} | {"data": mesh.data_rank(rank)}
        for rank in range(mesh.world_size)
    ]


@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from([None, "pp", "ddp", "fsdp", "tp"]))
def test_what_a_text_says_is_the_mesh_with_one_size_left_out(
    pp: int, ddp: int, fsdp: int, tp: int, left: str | None
) -> None:
    sizes = {"pp": pp, "ddp": ddp, "fsdp": fsdp, "tp": tp}
    words = [name if name == left else f"{name}={size}" for name, size in sizes.items()]
    nodes, gpus = pp * ddp, fsdp * tp
    mesh = layout(", ".join(words), nodes, gpus)
    assert mesh == Layout(pp, ddp, fsdp, tp)
    assert layout(str(mesh), nodes, gpus) == mesh


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "mesh", "shown"),
    [
        ("ddp", 2, 4, Layout(ddp=8), "ddp=8"),
        ("ddp", 1, 1, Layout(), "single"),
        ("single", 1, 1, Layout(), "single"),
        ("single=1", 1, 1, Layout(), "single"),
        ("dp", 1, 4, Layout(threads=True), "dp"),
        ("dp=4", 1, 4, Layout(threads=True), "dp"),
        ("zero1", 2, 4, Layout(ddp=8, zero=True), "zero1=8"),
        ("pp=2,zero1", 2, 4, Layout(pp=2, ddp=4, zero=True), "pp=2,zero1=4"),
        ("zero1", 1, 1, Layout(), "single"),
        ("fsdp", 2, 4, Layout(fsdp=8), "fsdp=8"),
        ("hsdp", 2, 4, Layout(ddp=2, fsdp=4), "ddp=2,fsdp=4"),
        ("hsdp=2", 1, 4, Layout(ddp=2, fsdp=2), "ddp=2,fsdp=2"),
        ("hsdp,tp=2", 2, 4, Layout(ddp=2, fsdp=2, tp=2), "ddp=2,fsdp=2,tp=2"),
        ("tp=4,ddp", 2, 4, Layout(ddp=2, tp=4), "ddp=2,tp=4"),
        ("tp = 2, pp = 4", 2, 4, Layout(pp=4, tp=2), "pp=4,tp=2"),
    ],
)
def test_a_strategy_is_a_mesh(text: str, nodes: int, gpus: int, mesh: Layout, shown: str) -> None:
    assert layout(text, nodes, gpus) == mesh
    assert str(mesh) == shown
    assert mesh.plain == (mesh.pp == mesh.fsdp == mesh.tp == 1)
    assert processes(text, gpus) == (1 if mesh.threads else gpus)


# text -> words of the error, its hint included; on 2 nodes with 4 GPUs each
WRONG = {
    "": ["unknown strategy ''"],
    "dpp": ["unknown strategy 'dpp'", "did you mean"],
    "fsdp2": ["unknown strategy 'fsdp2'", "did you mean fsdp?"],
    "ddp,": ["unknown strategy ''"],
    "ddp=4,ddp=2": ["'ddp=4,ddp=2' has ddp twice", "fsdp=4,tp=2"],
    "ddp=": ["invalid size in 'ddp='"],
    "ddp=0": ["invalid size in 'ddp=0'"],
    "ddp=-8": ["invalid size in 'ddp=-8'"],
    "ddp=2.5": ["invalid size in 'ddp=2.5'"],
    "ddp=eight": ["invalid size in 'ddp=eight'", "names and sizes"],
    "ddp=٨": ["invalid size in 'ddp=٨'"],
    "ddp=" + "9" * 5000: ["invalid size in 'ddp="],
    "ddp=2=4": ["invalid size in 'ddp="],
    "dp,tp=2": ["dp cannot be combined with others"],
    "single,ddp": ["single cannot be combined with others"],
    "ddp,tp": ["omits more than one size"],
    "zero1=2,ddp=4": ["zero1 conflicts with ddp", "optimizer state"],
    "zero1=2,fsdp=4": ["zero1 conflicts with fsdp"],
    "zero1=2,hsdp=4": ["zero1 conflicts with hsdp"],
    "zero1=2,tp=4": ["zero1 conflicts with tp"],
    "hsdp=4,fsdp=2": ["hsdp conflicts with fsdp"],
    "hsdp=4,ddp=2": ["hsdp conflicts with ddp"],
    "hsdp=2,tp": ["all other sizes are required with hsdp"],
    "hsdp,tp=4": ["within each of several nodes", "each node has one rank", "hsdp=2"],
    "dp": ["dp uses one process on one node with all its GPUs", "2 x 4 = 8 ranks", "use ddp"],
    "single": ["single uses one process, but there are 2 x 4 = 8 ranks", "--nodes 1 --gpus 1"],
    "pp=2,ddp=5": ["pp=2 x ddp=5 = 10, but there are 2 x 4 = 8 ranks", "product of the sizes"],
    "pp=2,ddp=2": ["pp=2 x ddp=2 = 4, but there are 2 x 4 = 8 ranks"],
    "pp=3,ddp": ["pp=3 = 3, but there are 2 x 4 = 8 ranks", "may be omitted"],
    "pp=16,ddp": ["pp=16 = 16, but there are"],
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_strategy_here(text: str) -> None:
    with pytest.raises(UserError) as caught:
        layout(text, 2, 4, "toy.toml: strategy")
    assert caught.value.where == "toy.toml: strategy"
    shown = f"{caught.value.what}\n{caught.value.hint}"
    assert [word for word in WRONG[text] if word not in shown] == []


@pytest.mark.parametrize(
    ("text", "gpus", "what"),
    [
        ("hsdp", 4, "there is one node"),
        ("dp=2", 4, "with all its GPUs, got 1 x 4 = 4 ranks"),
        ("single=2", 1, "single uses one process, got 'single=2'"),
        ("tp=2", 1, "tp=2 = 2, but there are 1 x 1 = 1 rank"),
    ],
)
def test_what_is_no_strategy_on_one_node(text: str, gpus: int, what: str) -> None:
    with pytest.raises(UserError, match=f"{re.escape(what)}\n"):
        layout(text, 1, gpus)


def test_every_strategy_can_stand_alone() -> None:
    assert [parse(name) for name in STRATEGIES] == [{name: None} for name in STRATEGIES]
