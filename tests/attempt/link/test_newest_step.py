"""Who saves the newest step: the ranks of one whole replica, and others if they fail."""

import pytest

from hpcddp.attempt.link.newest_step import DECIDE, SAVE, NewestStep, NodeShares, Share


def held(
    *waits: tuple[int, int, int, int], saved: tuple[int, ...] = (), busy: int = 0
) -> NodeShares:
    """Of ranks with their step, their replica and its size."""
    return NodeShares({rank: Share(*facts, 5) for rank, *facts in waits}, {*saved}, busy)


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        ([held((0, 7, 0, 1)), held((2, 7, 2, 1), (3, 7, 3, 1))], [0]),
        ([held((0, 7, 0, 1)), held((2, 8, 2, 1), (3, 7, 3, 1))], [2]),  # the newest
        ([held((0, 7, 0, 2)), held((2, 7, 2, 2), (3, 7, 2, 2))], [2, 3]),  # a whole replica
        ([held((0, 8, 0, 2), (1, 7, 0, 2)), held((2, 7, 2, 2), (3, 7, 2, 2))], [2, 3]),
        ([held((0, 7, 0, 2)), held((3, 7, 2, 2))], []),
        ([held(), held()], []),
    ],
)
def test_a_whole_replica_with_the_newest_step_saves(
    nodes: list[NodeShares], chosen: list[int]
) -> None:
    newest = NewestStep(2, alarm=100.0)
    newest.held = dict(enumerate(nodes))
    assert newest.verdict(100.0) == chosen


def test_answers_are_waited_for_but_not_for_ever() -> None:
    newest = NewestStep(2, alarm=100.0)
    newest.held[0] = held((0, 7, 0, 1))
    assert newest.verdict(101.0) is None  # a node has not answered
    newest.held[1] = held((2, 8, 2, 1), busy=1)
    assert newest.verdict(101.0) is None
    assert newest.verdict(100.0 + DECIDE) == [2]


@pytest.mark.parametrize(("why", "after"), [("gone", 1.0), ("slow", SAVE + 1.0)])
def test_another_one_saves_where_the_chosen_one_fails(why: str, after: float) -> None:
    newest = NewestStep(1, alarm=0.0)
    newest.held[0] = held((0, 7, 0, 1), (1, 7, 1, 1))
    assert newest.verdict(0.0) == [0] and newest.verdict(1.0) is None
    if why == "gone":
        newest.held[0] = held((1, 7, 1, 1))
    assert newest.verdict(after) == [1]
    newest.held[0] = held(saved=(1,))
    assert newest.verdict(after + 1.0) == []
