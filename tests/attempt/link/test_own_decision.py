"""Who saves the newest step, where no supervisor decides: parents agree in the run folder."""

from pathlib import Path
from typing import Any

import pytest

from hpcddp.attempt.link.own_decision import LOOK, SHOWN, OwnDecision, claim, unsaved
from hpcddp.rundir import RunDir


def report(
    *waits: tuple[int, int, int, int],
    saved: tuple[int, ...] = (),
    busy: int = 0,
    divided: bool = False,
) -> dict[str, Any]:
    """Of ranks with their step, their replica and its size.

    Args:
        divided: the replicas are on two nodes.
    """
    held = {rank: [*facts, 5] for rank, *facts in waits}
    return {"waits": held, "saved": [*saved], "busy": busy, "divided": divided}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.saving(1).mkdir(parents=True)
    return run


def test_the_first_parent_that_claims_a_step_saves_it(run: RunDir) -> None:
    first, second = (OwnDecision(run, 1, node, 0.0) for node in (1, 2))
    assert first.verdict(report((2, 7, 2, 1), (3, 7, 3, 1)), 0.0) == [2]
    assert second.verdict(report((4, 7, 4, 1)), 0.0) == []
    assert second.verdict(report((4, 7, 4, 1)), 1.0) is None
    assert first.verdict(report((3, 7, 3, 1)), 1.0) == [3]  # another of its ranks, as 2 is gone
    assert first.verdict(report(saved=(3,)), 2.0) == []


def test_a_newer_step_is_claimed_by_itself(run: RunDir) -> None:
    assert OwnDecision(run, 1, 1, 0.0).verdict(report((1, 7, 1, 1)), 0.0) == [1]
    assert OwnDecision(run, 1, 2, 0.0).verdict(report((2, 8, 2, 1)), 0.0) == [2]


def test_the_nodes_of_a_replica_save_together(run: RunDir) -> None:
    """Replicas of two nodes each; the first node is lost."""
    shares = {node: report((node, 7, node // 2 * 2, 2), divided=True) for node in (1, 2, 3)}
    parents = {node: OwnDecision(run, 1, node, 0.0) for node in shares}
    assert parents[2].verdict(shares[2], 0.0) is None and not unsaved(run, 1)
    assert parents[3].verdict(shares[3], 0.0) == [2, 3] and unsaved(run, 1)
    assert parents[2].verdict(shares[2], LOOK) == [2, 3]
    assert parents[1].verdict(shares[1], LOOK) == []  # its other node is lost, and 7 is saved
    # Each leaves when both have saved.
    assert parents[2].verdict(report(saved=(2,), divided=True), 2 * LOOK) is None
    (run.checkpoints / "step-7").mkdir()
    assert parents[3].verdict(report(saved=(3,), divided=True), 2 * LOOK) == []
    assert parents[2].verdict(report(saved=(2,), divided=True), 3 * LOOK) == []
    assert not unsaved(run, 1)


@pytest.mark.parametrize("saved", [(), (2,)])  # it has failed; or there was nothing new to save
def test_a_claimed_step_that_never_comes_is_not_waited_for(
    run: RunDir, saved: tuple[int, ...]
) -> None:
    parent = OwnDecision(run, 1, 1, 0.0)
    assert parent.verdict(report((2, 0, 2, 1)), 0.0) == [2] and unsaved(run, 1)
    assert parent.verdict(report(saved=saved), 1.0) == [] and not unsaved(run, 1)


def test_a_newer_step_waits_for_its_other_node(run: RunDir) -> None:
    parent, older = OwnDecision(run, 1, 1, 0.0), OwnDecision(run, 1, 2, 0.0)
    assert older.verdict(report((2, 7, 2, 1)), 0.0) == [2]
    newer = report((1, 8, 0, 2), divided=True)
    assert parent.verdict(newer, SHOWN - 1) is None
    assert parent.verdict(newer, SHOWN) == []


def test_a_replica_that_has_lost_a_node_in_its_save_gives_up(run: RunDir) -> None:
    shares = {node: report((node, 7, 2, 2), divided=True) for node in (2, 3)}
    parents = {node: OwnDecision(run, 1, node, 0.0) for node in shares}
    chosen = [parents[node].verdict(shares[node], node * LOOK) for node in (2, 3)]
    chosen.append(parents[2].verdict(shares[2], 4 * LOOK))
    assert chosen == [None, [2, 3], [2, 3]]
    assert parents[3].verdict(report(divided=True), 5 * LOOK) == []  # its rank has failed
    assert parents[2].verdict(shares[2], 6 * LOOK) == []


def test_two_replicas_on_the_same_nodes_agree_on_one(run: RunDir) -> None:
    """As with two pipelines of two stages; one rank answers late."""
    early = report((0, 7, 0, 2), divided=True, busy=1)
    first = report((0, 7, 0, 2), (1, 7, 1, 2), divided=True)
    second = report((2, 7, 0, 2), (3, 7, 1, 2), divided=True)
    one, two = (OwnDecision(run, 1, node, 0.0) for node in (0, 1))
    assert one.verdict(early, 0.0) is None
    assert two.verdict(second, 0.0) is None  # the other node has not told all
    assert one.verdict(first, LOOK) == [0, 2]
    assert two.verdict(second, LOOK) == [0, 2]
    # Rank 2 fails.
    last = report((3, 7, 1, 2), divided=True)
    assert two.verdict(last, 2 * LOOK) == [1, 3]
    assert one.verdict(first, 2 * LOOK) == [1, 3]


def test_a_parent_that_has_given_up_is_not_waited_for(run: RunDir) -> None:
    shares = {node: report((node, 7, 2, 2), divided=True) for node in (2, 3)}
    first, second = OwnDecision(run, 1, 2, 0.0), OwnDecision(run, 1, 3, SHOWN)
    assert first.verdict(shares[2], 0.0) is None
    assert first.verdict(shares[2], SHOWN) == []
    assert second.verdict(shares[3], SHOWN) is None  # it cannot save alone


@pytest.mark.parametrize("divided", [False, True])
def test_ranks_that_hold_nothing_leave_at_once(run: RunDir, divided: bool) -> None:
    assert OwnDecision(run, 1, 1, 0.0).verdict(report(divided=divided), 0.0) == []


@pytest.mark.parametrize("divided", [False, True])
def test_nobody_saves_a_step_once_a_newer_attempt_has_begun(run: RunDir, divided: bool) -> None:
    assert claim(run.saving(1), 7, 0, ()) == 0
    run.saving(1).rename(run.saving(1).with_name(".gone"))
    assert claim(run.saving(1), 7, 0, ()) == -1
    mine = report((0, 7, 0, 1 + divided), divided=divided)
    assert OwnDecision(run, 1, 0, 0.0).verdict(mine, 0.0) == []
