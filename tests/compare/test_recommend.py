"""The simplest strategy that fits."""

import pytest

from hpcddp import strategy
from hpcddp.compare.memory_estimate import Estimate, Need
from hpcddp.compare.recommend import Candidate, candidates, recommend, smaller

G = 2**30


def row(text: str, state: float, activations: float | None, batch: int = 8) -> Candidate:
    """A strategy that takes so many G."""
    kept = None if activations is None else activations * G
    need = Need(state * G, 0, 0, 0, kept)
    return Candidate(text, strategy.layout(text, 1, 4), Estimate([need], {}, (batch, 1)))


ROWS = [row("ddp", 60, 10), row("zero1", 40, 10), row("fsdp", 20, 10), row("tp", 15, 40)]


@pytest.mark.parametrize(
    ("memory", "choice", "words"),
    [
        (90, "ddp", "ddp is the simplest, and fits: 70G of 90G."),
        (80, "ddp", "fits with --set train.micro_batch=2: it takes 70G"),
        (70, "zero1", "ddp needs 70G, and of 70G it can have 56G; zero1 is the simplest"),
        (40, "fsdp", "with 30G"),
        (30, "", "None fits into 30G, of which a job can have 24G: fsdp needs least, 30G."),
        (0, "", "(--memory 80G)"),
    ],
)
def test_the_simplest_that_fits_is_recommended(memory: int, choice: str, words: str) -> None:
    text, why = recommend(ROWS, memory * G)
    assert text == choice
    assert words in why


def test_without_memory_it_is_told_what_each_would_need() -> None:
    assert "ddp needs a GPU with 87.5G, and fsdp needs a GPU with 37.5G" in recommend(ROWS, 0)[1]


def test_what_cannot_be_is_not_recommended() -> None:
    bad = Candidate("ddp", None, reason="the batch does not divide")
    assert recommend([bad, *ROWS[1:]], 100 * G)[0] == "zero1"
    assert recommend([bad], 100 * G) == ("", "None of these can be: the reasons are in the table.")


def test_unknown_activations_are_mentioned() -> None:
    text, why = recommend([row("ddp", 8, None)], 80 * G)
    assert text == "ddp" and "leave room" in why


def test_dp_is_not_recommended_beside_ddp() -> None:
    assert recommend([row("dp", 1, 1), row("ddp", 1, 1)], 80 * G)[0] == "ddp"


@pytest.mark.parametrize(("memory", "micro"), [(100, 8), (80, 2), (76, 0), (40, 0)])
def test_a_smaller_micro_batch_divides_the_share(memory: int, micro: int) -> None:
    assert smaller(ROWS[0], memory * G) == micro


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 6, 8])
def test_candidates_are_strategies_of_so_many_gpus(nodes: int, gpus: int) -> None:
    texts = candidates(nodes, gpus)
    meshes = [strategy.layout(text, nodes, gpus) for text in texts]
    assert all(mesh.world_size == nodes * gpus or mesh.threads for mesh in meshes)
    assert len({str(mesh) for mesh in meshes}) == len(texts)
    assert all(mesh.tp <= gpus for mesh in meshes)
    assert ("hsdp" in texts) == (nodes > 1 and gpus > 1)
