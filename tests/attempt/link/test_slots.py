"""What the ranks of a node tell their parent in shared memory."""

import pytest

from hpcddp.attempt.link import slots
from hpcddp.attempt.link.slots import NodeSlots, Slot, own_slot


def ranks_of(node: NodeSlots) -> list[Slot]:
    environ = {slots.NAME: str(node.descriptor)}
    return [own_slot({**environ, "LOCAL_RANK": str(rank)}) for rank in range(node.ranks)]


@pytest.mark.parametrize(
    ("joined", "divided"),
    [
        ([(0, 1), (1, 1)], False),
        ([(0, 2), (0, 2)], False),
        ([(0, 4), (0, 4)], True),
        ([(0, 1), (2, 2)], True),
        ([(0, 2)], True),
        ([], False),
    ],
)
def test_a_parent_knows_whether_other_nodes_have_ranks_of_its_replicas(
    joined: list[tuple[int, int]], divided: bool
) -> None:
    node = NodeSlots(2)
    node.begin()
    for rank, replica in zip(ranks_of(node), joined, strict=False):
        rank.join(*replica)
    assert node.report([])["divided"] == divided  # also of ranks that are gone


def test_a_rank_tells_what_it_holds_and_hears_the_verdict() -> None:
    node = NodeSlots(2)
    node.begin()
    first, second = ranks_of(node)
    first.tell(slots.ARMED)
    second.join(1, 1)
    second.tell(slots.WAITS, step=7, seconds=1.2)
    report = node.report([2, 3])
    assert report["waits"] == {3: [7, 1, 1, 2]} and report["busy"] == 1
    node.alarm()
    node.judge(1, slots.SAVE)
    assert first.alarm and (first.verdict, second.verdict) == (slots.NONE, slots.SAVE)
