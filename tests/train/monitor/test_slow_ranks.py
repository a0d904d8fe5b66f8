"""Which ranks are slow, and whether training waits for its data: from figures alone."""

import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from hpcddp.attempt.joblog import line
from hpcddp.train.monitor.slow_ranks import SlowRanks, median_of_others

NAN = float("nan")


class Told:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []

    def __call__(self, event: str, **values: Any) -> None:
        self.records.append({"event": event, **values})

    def ranks(self, **values: Any) -> None:
        self.lines.append(values)


class Group:
    """So many ranks, and their figures record by record."""

    def __init__(self, size: int, stages: Sequence[int] = ()) -> None:
        self.told, self.step = Told(), 0
        hosts = [f"n{rank}" for rank in range(size)]
        told: Any = self.told
        self.pace = SlowRanks(told, hosts, stages or [0] * size, 1.5, lambda: "take more")
        self.busy([0.01] * size)

    def busy(
        self, seconds: Sequence[float], waits: Sequence[float] = (), step_s: float = 0.1
    ) -> list[dict[str, Any]]:
        """Ten steps with these forward passes; what was told of them."""
        self.step += 10
        before = len(self.told.records)
        waits = waits or [0.0] * len(seconds)
        figures = [[w, step_s, s, 5.0, NAN, NAN] for w, s in zip(waits, seconds, strict=True)]
        known = [w for w in waits if w == w]
        self.pace.look(self.step, {"step_s": step_s, "wait_s": max(known)}, figures)
        return self.told.records[before:]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_each_is_beside_the_median_of_the_others(count: int) -> None:
    values = [float((7 * i * i + 3) % 11) for i in range(count)]
    ranked = sorted((value, rank) for rank, value in enumerate(values))
    for place, (_, rank) in enumerate(ranked):
        by_hand = statistics.median(values[:rank] + values[rank + 1 :])
        assert median_of_others(ranked, place) == by_hand


def test_a_slow_rank_is_named_once_with_when_it_began_and_once_when_it_is_over() -> None:
    group = Group(4)
    slow, even = [0.015, 0.016, 0.015, 0.032], [0.015, 0.016, 0.015, 0.017]
    assert group.busy(even) == group.busy(slow) == group.busy(slow) == []
    (told,) = group.busy(slow)
    assert (told["rank"], told["host"], told["what"], told["since"]) == (3, "n3", "compute", 21)
    assert told["ratio"] == pytest.approx(32 / 15)
    assert line(told) == (
        "step 50  rank 3 on n3 is slow: 32 ms of its own a step, the others 15 ms (2.1 times), "
        "since step 21"
    )
    assert [group.busy(how) for how in (slow, slow, even, slow, even, even)] == [[]] * 6
    (over,) = group.busy(even)
    assert over == {"event": "recovered", "step": 120, "rank": 3, "host": "n3", "what": "compute"}
    assert line(over) == "step 120  rank 3 on n3 is as fast as the others again"


def test_a_record_between_two_slow_ones_is_enough_to_say_nothing() -> None:
    group = Group(2)
    for _ in range(5):
        assert group.busy([0.01, 0.05]) == group.busy([0.01, 0.05]) == group.busy([0.01] * 2) == []


def test_of_two_ranks_the_other_one_is_the_measure() -> None:
    group = Group(2)
    told = [group.busy([0.030, 0.016]) for _ in range(3)][-1]
    assert [r["rank"] for r in told] == [0]


def test_less_than_a_millisecond_is_no_matter() -> None:
    group = Group(3)
    assert [group.busy([0.0001, 0.0001, 0.0009]) for _ in range(5)] == [[]] * 5


def test_a_small_part_of_a_step_is_no_matter_and_a_rank_recovers_to_half_of_that() -> None:
    group, even = Group(4), [0.001] * 4
    for waits in ([1e-4, 1e-4, 1e-4, 1.3e-3], [1e-3, 1e-3, 1e-3, 0.049]):
        assert [group.busy(even, waits, 1.0) for _ in range(4)] == [[]] * 4
        assert [group.busy(waits, (), 1.0) for _ in range(4)] == [[]] * 4
    (told,) = [group.busy([0.01, 0.01, 0.01, 0.062], (), 1.0) for _ in range(3)][-1]
    assert (told["event"], told["rank"]) == ("slow", 3)
    assert [group.busy([0.01, 0.01, 0.01, 0.036], (), 1.0) for _ in range(4)] == [[]] * 4
    (over,) = [group.busy([0.01, 0.01, 0.01, 0.034], (), 1.0) for _ in range(3)][-1]
    assert (over["event"], over["rank"]) == ("recovered", 3)


def test_stages_of_a_pipeline_may_differ_and_ranks_of_one_may_not() -> None:
    group = Group(4, stages=[0, 0, 1, 1])
    assert [group.busy([0.01, 0.01, 0.09, 0.09]) for _ in range(4)] == [[]] * 4
    told = [group.busy([0.01, 0.01, 0.09, 0.2]) for _ in range(3)][-1]
    assert [r["rank"] for r in told] == [3]


def test_what_nobody_knows_is_null_and_beside_nothing() -> None:
    group = Group(2)
    assert [group.busy([NAN, 0.5], [NAN, 0.0]) for _ in range(4)] == [[]] * 4
    assert group.told.lines[-1] == {
        "step": 50, "wait_s": [None, 0], "step_s": [0.1, 0.1], "busy_s": [None, 0.5],
        "samples_per_s": [5, 5], "memory": [None, None], "gpu": [None, None],
    }  # fmt: skip


def test_a_rank_whose_data_is_slow_is_told_apart_and_so_is_the_wait_of_all() -> None:
    group = Group(3)
    waits = [0.0, 0.031, 0.001]
    data, waiting = [group.busy([0.01] * 3, waits) for _ in range(3)][-1]
    assert (data["event"], data["what"], data["rank"]) == ("slow", "data", 1)
    assert line(data).endswith(
        "rank 1 on n1 waits for its data: 31 ms a step, the others 0.5 ms, since step 11"
    )
    assert waiting["share"] == pytest.approx(0.31)
    assert line(waiting) == "step 40  31% of the time is waiting for data; take more"
    assert [group.busy([0.01] * 3, waits) for _ in range(3)] == [[]] * 3
    (worse,) = group.busy([0.01] * 3, [0.0, 0.047, 0.001])
    assert worse["event"] == "waiting" and worse["share"] == pytest.approx(0.47)


def test_without_figures_of_ranks_the_wait_of_all_is_told() -> None:
    told = Told()
    recorder: Any = told
    pace = SlowRanks(recorder, ["", ""], [0, 0], 1.5, lambda: "")
    for step in range(5):
        pace.look(step, {"step_s": 0.1, "wait_s": 0.05}, [[0.05], [0.0]])
    assert [r["event"] for r in told.records] == ["waiting"] and not told.lines


def test_steps_left_out_have_no_share() -> None:
    group = Group(2)
    group.pace.look(20, {}, [[0.0, 0.1, 0.01, 0.0, NAN, NAN]] * 2)
    assert not group.told.records
