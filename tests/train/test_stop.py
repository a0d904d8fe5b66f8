"""The vote on stopping, in one process: what asks for a stop, and how far apart votes are."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from hpcddp.errors import LeaseLost
from hpcddp.preempt import Preemption
from hpcddp.rundir import RunDir, write_json
from hpcddp.topology import Rank
from hpcddp.train import stop
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.rank.world import World
from hpcddp.train.stop import GROWTH, QUICK, SECONDS, StopVote


class Judge:
    """Meets bad numbers where it is told to."""

    def __init__(self) -> None:
        self.meets, self.settled = False, []

    def bad(self) -> bool:
        return self.meets

    def settle(self, step: int, bad: bool) -> None:
        self.settled.append((step, bad))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.attempt(1).path.mkdir(parents=True)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass when a test says so."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(stop.time, "monotonic", lambda: made.now)
    return made


def vote_of(run: RunDir, **words) -> StopVote:
    world = World(Rank(0, 1, 0, 1, 0), torch.device("cpu"), "gloo", [], HashStore())
    facts = {"preemption": Preemption(), "lease": Lease(run, 1), "detector": Judge(), **words}
    return StopVote(world, request=run.request, **facts)


def test_nobody_asks_and_it_goes_on(run: RunDir, clock) -> None:
    vote = vote_of(run)
    for tick in range(1, 50):
        clock.now += 1.0
        assert not vote.agreed(tick)


def test_a_signal_stops_it_at_the_next_vote_and_is_named(run: RunDir, clock) -> None:
    asked = Preemption()
    vote = vote_of(run, preemption=asked)
    assert not vote.agreed(1)
    asked.requested, asked.signal, asked.when = True, "SIGUSR2", 77.0
    clock.now += 1.0
    assert vote.agreed(2)
    assert vote.asked_by() == ("SIGUSR2", 77.0)


def test_a_request_in_the_run_dir_stops_it_and_is_looked_at_once_a_second(
    run: RunDir, clock
) -> None:
    vote = vote_of(run)
    assert not vote.agreed(1)
    write_json(run.request, {"want": "preempt"})
    clock.now += stop.REQUEST_SECONDS / 2
    assert not vote.agreed(2)
    clock.now += stop.REQUEST_SECONDS / 2
    assert vote.agreed(3)
    assert vote.asked_by()[0] == "preempt"


@pytest.mark.parametrize(("left", "stops"), [(100.0, False), (29.0, True)])
def test_it_stops_a_save_before_the_time_limit(run: RunDir, clock, left, stops) -> None:
    vote = vote_of(run, deadline=time.time() + left, lead=lambda: 30.0)
    assert vote.agreed(1) is stops
    assert not stops or vote.asked_by()[0] == "time limit"


@pytest.mark.parametrize(("before", "after"), [(9000.0, 5.0), (5.0, 9000.0)])
def test_a_time_limit_that_slurm_has_changed_is_kept(run: RunDir, clock, before, after) -> None:
    write_json(run.attempt(1).slurm, {"deadline": time.time() + after})
    vote = vote_of(run, deadline=time.time() + before, lead=lambda: 10.0)
    assert vote.agreed(1) is (after < 10)


def test_an_attempt_that_is_superseded_leaves(run: RunDir, clock) -> None:
    vote = vote_of(run)
    assert not vote.agreed(1)
    run.attempt(2).path.mkdir(parents=True)
    clock.now += 2.0
    with pytest.raises(LeaseLost, match="a newer attempt owns this run"):
        vote.agreed(2)


def test_bad_numbers_are_settled_with_the_step_that_they_are_of(run: RunDir, clock) -> None:
    judge = Judge()
    vote = vote_of(run, detector=judge)
    vote.agreed(1)
    judge.meets = True
    clock.now += 1.0
    vote.agreed(2, step=40)
    assert judge.settled == [(1, False), (40, True)]


def votes(run: RunDir, clock, seconds: float, ticks: int) -> list[int]:
    """The ticks at which a vote was counted, where a tick takes so long."""
    judge, counted = Judge(), []
    vote = vote_of(run, detector=judge)
    for tick in range(1, ticks + 1):
        clock.now += seconds
        before = len(judge.settled)
        vote.agreed(tick)
        counted += [tick] * (len(judge.settled) - before)
    assert vote.quick is (SECONDS / seconds >= QUICK)
    return counted


def test_long_steps_are_voted_on_one_by_one(run: RunDir, clock) -> None:
    assert votes(run, clock, 1.0, 10) == list(range(1, 11))


def test_short_steps_have_a_vote_in_a_while_counted_one_later(run: RunDir, clock) -> None:
    counted = votes(run, clock, 0.002, 1000)
    apart = [b - a for a, b in itertools.pairwise(counted)]
    assert max(apart) == pytest.approx(SECONDS / 0.002, abs=2)
    assert all(b <= GROWTH * a + 2 for a, b in itertools.pairwise(apart))


def test_a_vote_that_is_wanted_now_is_counted_now(run: RunDir, clock) -> None:
    asked = Preemption()
    vote = vote_of(run, preemption=asked)
    for tick in range(1, 200):
        clock.now += 0.001
        assert not vote.agreed(tick)
    asked.requested, asked.signal = True, "SIGTERM"
    assert vote.agreed(200, now=True)
