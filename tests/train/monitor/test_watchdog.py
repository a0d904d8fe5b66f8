"""Ranks that stand still: who is found, what is kept, and how the others leave."""

import itertools
import json
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from ranks import Ranks, make_run, one_rank, records, wait_for

from hpcddp.attempt import first_failure
from hpcddp.attempt.exit_codes import HUNG
from hpcddp.train.monitor.heartbeat import Heartbeat
from hpcddp.train.monitor.watchdog import SLOWEST, Watchdog

SLOW = """
import time
_loss = loss
def loss(output, target):
    time.sleep(0.005)
    return _loss(output, target)
"""

# Rank 1 goes no further after its fifth step.
STUCK = """
import ctypes, os, threading, time
_loss, _dataset, steps = loss, dataset, []
class Watched(torch.utils.data.Dataset):
    def __init__(self, inner): self.inner = inner
    def __len__(self): return len(self.inner)
    def __getitem__(self, i):
        names = [t.name for t in threading.enumerate()]
        assert torch.utils.data.get_worker_info() is None or "hpcddp watchdog" not in names
        return self.inner[i]
def dataset(split):
    return Watched(_dataset(split))
def asleep():
    time.sleep(1000)
def greedy():  # PyDLL keeps Python's lock
    end, _ = os.pipe()
    ctypes.PyDLL(None).read(end, ctypes.create_string_buffer(1), 1)
def loss(output, target):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 6:
        {how}()
    return _loss(output, target)
"""


def hang_of(run):
    """hang.json, by rank, and error.json."""
    told = json.loads(run.attempt(1).hang.read_text())
    return told, {r["rank"]: r for r in told["ranks"]}, json.loads(run.attempt(1).error.read_text())


def test_a_stopped_rank_is_found_and_the_others_leave(tmp_path):
    run = make_run(tmp_path, gpus=2, max_steps=10**6, extra=SLOW, train__hang_seconds=2)
    with Ranks.of(run, 2) as ranks:
        wait_for(lambda: len(records(run, "train")) > 5, "5 steps")
        ranks.processes[1].send_signal(signal.SIGSTOP)
        _, err = ranks.processes[0].communicate(timeout=30)
        assert ranks.processes[0].returncode == HUNG == 86
        assert ranks.processes[1].poll() is None  # nobody but the launcher ends it
    told, by_rank, error = hang_of(run)
    host = told["suspect"]["host"]
    assert told["suspect"] == {"rank": 1, "host": host}
    behind = told["step"] - records(run, "train")[-1]["step"]  # its record may wait for the other
    times = [record["time"] for record in records(run, "train")]
    slowest = max(later - earlier for earlier, later in itertools.pairwise(times))
    # The limit is ten times the slowest step, or 2 s; the watchdog times steps by its own looks.
    assert behind in (0, 1) and 2 <= told["seconds"] < max(2.0, 1.5 * SLOWEST * slowest) + 1
    assert (by_rank[0]["state"], by_rank[1]["state"]) == ("running", "stopped")
    kept = run.attempt(1).stack(1).read_text()
    assert "State:\tT (stopped)" in kept and "written by rank 0" in kept
    assert "all_reduce" in run.attempt(1).stack(0).read_text() or by_rank[0]["where"]
    assert (error["type"], error["kind"], error["rank"]) == ("Hang", "hang", 1)
    assert error["message"].endswith(f"rank 1 on {host} is stopped (SIGSTOP)")
    assert error["message"] in err
    assert (
        first_failure.of(run, SimpleNamespace(number=1))
        == f"rank 1 on {host}: Hang: {error['message']}"
    )


def test_a_rank_asleep_is_told_from_those_that_wait_for_it(tmp_path):
    extra = STUCK.replace("{how}", "asleep")
    run = make_run(
        tmp_path, gpus=2, max_steps=100, extra=extra, train__hang_seconds=2, data__workers=1
    )
    with Ranks.of(run, 2) as ranks:
        assert [code for code, _, _ in ranks.wait()] == [86, 86]
    told, by_rank, error = hang_of(run)
    assert told["step"] == 5
    assert [by_rank[n]["state"] for n in (0, 1)] == ["running", "running"]
    assert told["suspect"]["rank"] == 1
    line = (tmp_path / "small_task.py").read_text().splitlines().index("    time.sleep(1000)") + 1
    assert by_rank[1]["where"] == f"{tmp_path / 'small_task.py'}:{line} in asleep"
    assert by_rank[1]["where"] in error["message"] and "in asleep" in error["traceback"]
    kept = sorted(p.name for p in run.attempt(1).stacks.iterdir() if p.name[0] != ".")
    assert kept == ["rank-0.txt", "rank-1.txt"]  # DataLoader workers leave none


def test_a_rank_that_keeps_pythons_lock_shows_its_stack_all_the_same(tmp_path):
    extra = STUCK.replace("{how}", "greedy")
    run = make_run(tmp_path, gpus=2, max_steps=100, extra=extra, train__hang_seconds=2)
    with Ranks.of(run, 2) as ranks:
        ranks.processes[0].communicate(timeout=60)
        assert ranks.processes[0].returncode == 86
        assert ranks.processes[1].poll() is None
    told, by_rank, _ = hang_of(run)
    assert told["suspect"]["rank"] == 1 and by_rank[1]["where"].endswith("in greedy")


def test_without_a_process_of_its_own_a_training_is_not_ended(tmp_path):
    """`hpcddp run` is for a debugger, which may stand still."""
    pause = SLOW.replace("0.005", "0.1")
    assert one_rank(make_run(tmp_path, extra=pause, train__hang_seconds=0.01)) == "done"


class Witness:
    """Stands for the evidence: says when it was called."""

    def __init__(self):
        self.begun = False
        self.called = threading.Event()

    def gather(self, step, seconds):
        self.seconds = seconds
        self.called.set()


@pytest.fixture
def watched():
    """A heartbeat, and what its watchdog of a fifth of a second called."""
    heartbeat, witness = Heartbeat(), Witness()
    watchdog = Watchdog(heartbeat, witness, 0.2, lambda: None)
    watchdog.start()
    yield heartbeat, witness, watchdog
    watchdog.stop()


def test_slow_steps_that_come_regularly_are_no_hang(watched):
    heartbeat, witness, watchdog = watched
    for step in range(4):
        heartbeat.beat(step)
        assert not witness.called.wait(0.6)
    assert 5 < watchdog.limit < 12  # ten times a step


def test_a_start_a_save_and_an_evaluation_may_take_longer(watched):
    heartbeat, witness, _ = watched
    assert not witness.called.wait(0.3)
    for step in range(3):
        heartbeat.beat(step)
        time.sleep(0.01)
    with heartbeat.patience():
        assert not witness.called.wait(0.6)
    for _ in range(10):
        heartbeat.touch()
        time.sleep(0.03)
    assert not witness.called.is_set()
    assert witness.called.wait(5) and witness.seconds < 5


def test_a_job_that_was_suspended_has_not_hung(watched, monkeypatch):
    """Its clock went on while it stood still."""
    heartbeat, witness, _ = watched
    for step in range(4):
        heartbeat.beat(step)
        time.sleep(0.01)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000)
    monkeypatch.setattr("hpcddp.train.monitor.watchdog.time", later)
    assert not witness.called.wait(0.05)
    heartbeat.beat(4)
    assert witness.called.wait(5) and witness.seconds < 10  # it still looks


def test_a_rank_follows_the_first_one_that_sees_it(watched):
    heartbeat, witness, watchdog = watched
    for step in range(4):
        heartbeat.beat(step)
        time.sleep(0.2)
    assert watchdog.limit > 0.8
    witness.begun = True
    assert witness.called.wait(5) and witness.seconds < watchdog.limit


def test_a_beat_costs_less_than_a_microsecond():
    heartbeat, best = Heartbeat(), 1.0
    for _ in range(5):
        began = time.perf_counter()
        for step in range(10_000):
            heartbeat.beat(step)
        best = min(best, (time.perf_counter() - began) / 10_000)
    assert best < 1e-6
