from collections.abc import Callable

import pytest
import torch

from hpcddp.train.rank import rates

NODES = [0, 0, 1, 1, 2, 2]


def test_a_rank_below_three_quarters_of_the_usual_rate_is_measured_again() -> None:
    assert rates.candidates([10, 9, 10, 8, 10, 7]) == [5]
    assert rates.candidates([10, 10]) == []


def test_the_fastest_nodes_without_slow_ranks_are_the_reference() -> None:
    measured = [4.0, 10, 9, 9, 11, 8]
    assert rates.references(measured, NODES, [0]) == {2}
    assert rates.references(measured, NODES, [0, 5]) == {1}
    assert rates.references(measured, NODES, [0, 3, 5]) == set()


@pytest.mark.parametrize(
    ("again", "named"),
    [
        ([5.0, 5, 0, 0, 10, 10], {0: 0.5, 1: 0.5}),
        ([9.0, 5, 0, 0, 10, 10], {1: 0.5}),  # the first one met another program
        ([9.0, 9, 0, 0, 10, 10], {}),
        ([5.0, 5, 0, 0, 5, 5], {}),  # the whole machine is busy now
    ],
)
def test_a_rank_is_named_only_if_it_is_slow_again(
    again: list[float], named: dict[int, float]
) -> None:
    assert rates.confirmed(again, NODES, [0, 1], {2}) == named


def test_a_rank_on_the_only_node_is_compared_with_the_others_there() -> None:
    assert rates.confirmed([10.0, 4, 10], [0, 0, 0], [1], set()) == {1: 0.4}


def test_nodes_are_measured_in_turn() -> None:
    log: list[str] = []

    def run(seconds: float) -> tuple[int, float]:
        log.append("run")
        return 100, seconds

    def barrier() -> None:
        log.append("wait")

    rate = rates.measure(run, {0, 1}, 1, barrier, rounds=2)
    assert rate == 100 / rates.TURN
    assert log == ["wait", "wait", "run", "wait", "wait", "run", "wait"]
    assert rates.measure(run, {0}, 1, barrier, rounds=2) == 0


def test_many_nodes_do_not_take_longer() -> None:
    turns: list[float] = []

    def run(seconds: float) -> tuple[int, float]:
        turns.append(seconds)
        return 1, seconds

    rates.measure(run, range(1000), 0, lambda: None, rounds=4)
    assert sum(turns) * 1000 <= rates.WHOLE


def test_the_work_takes_the_time_that_it_is_given() -> None:
    run: Callable[[float], tuple[int, float]] = rates.work(torch.device("cpu"))
    operations, seconds = run(0.05)
    assert operations > 0 and seconds >= 0.05
