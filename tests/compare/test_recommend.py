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
        (90, "ddp", "Use ddp: it is the simplest and needs 70 GB of 90 GB (72 GB usable)."),
        (80, "ddp", "Use ddp with --set train.micro_batch=2: "),
        (70, "zero1", "Use zero1: it is the simplest that fits, and needs 50 GB of 70 GB"),
        (40, "fsdp", "needs 30 GB of 40 GB (32 GB usable); ddp needs 70 GB."),
        (30, "", "No strategy fits in 30 GB (24 GB usable): fsdp needs least, 30 GB."),
        (0, "", "give it with --memory, such as 80G"),
    ],
)
def test_the_simplest_that_fits_is_recommended(memory: int, choice: str, words: str) -> None:
    text, why = recommend(ROWS, memory * G)
    assert text == choice
    assert words in why


def test_without_memory_it_is_told_what_each_would_need() -> None:
    assert (
        "ddp needs a GPU with 87.5 GB, and fsdp needs a GPU with 37.5 GB" in recommend(ROWS, 0)[1]
    )


def test_what_cannot_be_is_not_recommended() -> None:
    bad = Candidate("ddp", None, reason="the batch does not divide")
    assert recommend([bad, *ROWS[1:]], 100 * G)[0] == "zero1"
    assert recommend([bad], 100 * G) == (
        "",
        "No strategy works for this job: see the reasons above.",
    )


def test_unknown_activations_are_mentioned() -> None:
    text, why = recommend([row("ddp", 8, None)], 80 * G)
    assert text == "ddp" and "do not include activations" in why


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
